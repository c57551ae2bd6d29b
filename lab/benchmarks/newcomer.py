"""A newcomer's log: the seconds from ``git clone`` to a first answer, a first chat answer, and a first completion by
llama.cpp's ``/infill``, which editors send.

    python lab/benchmarks/newcomer.py FOLDER [--source .] [--models ~/.cache/forerun/models] [--coder NAME]

Everything is made anew in FOLDER, the cache of compiled kernels too, with the README's commands. Each line of output
has the second in which it came. ``--models`` has models that need not be fetched; ``--coder`` is one that fills in the
middle. ``--skip-install`` goes on in a FOLDER that is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PORT = 8123
BEGAN = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f}  {line}", flush=True)


def run(command: str, folder: Path, **around: str) -> None:
    """Runs a line of the README, and says when each line of its output came."""
    say(f"$ {command}")
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env={**os.environ, **around}, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            say(f"  {line.rstrip()[:110]}")
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")


def infill(prefix: str, suffix: str) -> str | None:
    """What stands between them; None while the server does not answer."""
    body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 16, "temperature": 0}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/infill", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return str(json.load(answer)["content"])
    except (urllib.error.URLError, ConnectionError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default=".")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--coder")
    parser.add_argument("--torch", default='"torch>=2.11" --index-url https://download.pytorch.org/whl/cpu')
    parser.add_argument("--skip-install", action="store_true")
    options = parser.parse_args()
    folder, cache = options.folder.resolve(), options.folder.resolve() / "cache"
    clone, around = folder / "forerun", {"FORERUN_CACHE": str(cache)}
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    if options.models:
        (cache / "models").symlink_to(options.models.expanduser().resolve())
    if not options.skip_install:
        run(f"git clone --quiet {Path(options.source).resolve()} {clone}", folder)
        run("python3 -m venv .venv", clone)
        run(f".venv/bin/pip install --quiet {options.torch}", clone)
        run('.venv/bin/pip install --quiet ".[serve]"', clone)
    run('.venv/bin/forerun generate "def parse(" --max-tokens 32', clone, **around)
    if not options.models:
        run(".venv/bin/forerun fetch smollm2", clone, **around)
    run('.venv/bin/forerun run smollm2 "What is a prime number?" --max-tokens 32', clone, **around)
    if options.coder:
        command = [".venv/bin/forerun", "serve", "--model", options.coder, "--port", str(PORT)]
        say(f"$ {' '.join(command)}")
        with open(folder / "serve.log", "w") as log:
            server = subprocess.Popen(command, cwd=clone, env={**os.environ, **around}, stdout=log, stderr=log)
        try:
            while (answer := infill("def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n")) is None:
                if server.poll() is not None:
                    sys.exit(f"the server ended: see {folder / 'serve.log'}")
                time.sleep(0.2)
            say(f"  /infill: {answer!r}")
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
