"""A compiler that takes no time: it hands over kernels that are compiled already."""

from pathlib import Path

from forerun import kernels

SCRIPT = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && to=$2; shift; done
case $to in *.so) cat "{kernels}" > "$to";; *) : > "$to";; esac
"""


def install_compiler(folder, monkeypatch):
    """The only compiler that is found from now on, by processes that begin too. Returns its log, a line a call."""
    result = kernels.library()
    assert result is not None
    whole = Path(result._name).read_bytes()
    folder.mkdir()
    (folder / "kernels").write_bytes(whole[: -kernels.HASH_SIZE])
    path, log = folder / "c++", folder / "log"
    path.write_text(SCRIPT.format(log=log, kernels=folder / "kernels"), encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log
