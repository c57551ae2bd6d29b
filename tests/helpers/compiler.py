"""A compiler that takes no time: it hands over kernels that are compiled already."""

from pathlib import Path

from forerun import kernels

SCRIPT = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && to=$2; shift; done
name=${{to##*-}}
[ -f "{kernels}/$name" ] || name=kernels.so
case $to in *.so) cat "{kernels}/$name" > "$to";; *) : > "$to";; esac
"""


def install_compiler(folder, monkeypatch):
    """The only compiler that is found from now on, by processes that begin too. Returns its log, a line a call."""
    result = kernels.library()
    assert result is not None
    whole = Path(result._name)
    (folder / "kernels").mkdir(parents=True)
    for path in (whole, *whole.parent.glob(f"{whole.stem}-*.so")):
        name = "kernels.so" if path == whole else path.name.rpartition("-")[2]
        (folder / "kernels" / name).write_bytes(path.read_bytes()[: -kernels.HASH_SIZE])
    path, log = folder / "c++", folder / "log"
    path.write_text(SCRIPT.format(log=log, kernels=folder / "kernels"), encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log
