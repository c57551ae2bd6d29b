"""What systemd and a container start: the unit's and the Dockerfile's commands, where only the cache may be written."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import free_port

from compiler import install_compiler
from here import where

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
UNIT = (EXAMPLES / "forerun.service").read_text(encoding="utf-8")
IMAGE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'
"""Leaves the folder ``$0`` writable: ``ProtectSystem=strict`` of the unit, ``read_only`` of the container."""
MOUNTS = shutil.which("unshare") is not None and os.geteuid() == 0

pytestmark = pytest.mark.slow


def lines(text, name):
    return re.findall(rf"^{name}[= ](.*)$", text, re.MULTILINE)


def of_systemd():
    """The command, its environment, and the folder that it may write."""
    return shlex.split(lines(UNIT, "ExecStart")[0]), lines(UNIT, "Environment")[0], "/var/cache/forerun"


def of_the_image():
    return (
        json.loads(lines(IMAGE, "ENTRYPOINT")[0]) + json.loads(lines(IMAGE, "CMD")[-1]),
        lines(IMAGE, "ENV")[-1],
        "/models",
    )


@pytest.mark.parametrize("started", [of_systemd, of_the_image])
@pytest.mark.parametrize("unshare", where(MOUNTS, ["unshare"], "only root makes the file system read-only"))
def test_it_serves_and_ends(tmp_path, monkeypatch, started, unshare):
    install_compiler(tmp_path / "bin", monkeypatch)
    cache = tmp_path / "cache"
    (cache / "tmp").mkdir(parents=True)
    (program, *options), given, folder = started()
    assert Path(program).name == "forerun"
    options = [option.replace("/etc/forerun", str(EXAMPLES)) for option in options]
    environment = dict(word.split("=", 1) for word in given.replace(folder, str(cache)).split())
    environment |= {"PATH": os.environ["PATH"], "HOME": "/", "TMPDIR": str(cache / "tmp"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    port = free_port()
    command = [sys.executable, "-m", "forerun", *options, "--port", str(port)]
    server = subprocess.Popen(
        [unshare, "-m", "sh", "-c", READ_ONLY, str(cache), *command], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        said = []
        for line in server.stdout:
            said.append(line)
            if "listening on" in line:
                break
        assert f":{port}" in said[-1], "".join(said)
        assert "Read-only" not in "".join(said)
        check = lines(IMAGE, "HEALTHCHECK")[0].partition("CMD ")[2].replace(":8000", f":{port}")
        healthy = subprocess.run(["sh", "-c", check.replace("python", sys.executable, 1)], check=False)
        assert healthy.returncode == 0
        assert list(cache.glob("kernels-*"))
        server.send_signal(signal.SIGTERM)
        assert server.wait(int(lines(UNIT, "TimeoutStopSec")[0])) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.stdout.read()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
