"""``make wheels`` ends with ``python .ci/wheels.py FILE...``: what each wheel carries, or what is
wrong with it."""

import hashlib
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from prebuild import TARGETS

from forerun import kernels

FORMATS = {"x86_64": b"\x3e\x00", "aarch64": b"\xb7\x00"}
"""ELF's number of the machine, at byte 18."""
MACH_O = b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01"
"""64 bits, ARM."""


def wrong(path):
    """What is wrong with a wheel, and the variants of the kernels in it."""
    platform = path.stem.split("-", 4)[4]
    expected = TARGETS.get(platform)
    with zipfile.ZipFile(path) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist() if "/carried/" in name}
        (about,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    said = message_from_bytes(about)
    found = [] if said["Tag"] == f"py3-none-{platform}" else [f"its tag is {said['Tag']}"]
    if said["Root-Is-Purelib"] != "false":
        found.append("it says that it is for every platform")
    names = [name for name, (needed, _) in kernels.VARIANTS.items() if expected and expected[1] in needed]
    if expected and not names:
        found.append(f"no variant of the kernels is for {platform}")
    if set(contents) != {f"forerun/kernels/carried/{kernels.prebuilt(name).name}" for name in names}:
        found.append(f"it carries {sorted(contents)}, not {names}")
    for name, content in contents.items():
        machine = MACH_O if "macosx" in platform else FORMATS[platform.split("_", 3)[3]]
        if not (content.startswith(machine) if machine == MACH_O else content[18:20] == machine):
            found.append(f"{name} is for another machine")
        if hashlib.sha256(content[: -kernels.HASH_SIZE]).digest() != content[-kernels.HASH_SIZE :]:
            found.append(f"{name} is damaged")
    if contents and "manylinux" in platform:
        command = [sys.executable, "-m", "auditwheel", "show", str(path)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        tag = re.search(r'platform tag: "manylinux_2_(\d+)_(\w+)"', " ".join(shown.stdout.split()))
        if tag is None or int(tag[1]) > 28 or not platform.endswith(tag[2]):
            found.append(f"auditwheel: {' '.join((shown.stdout + shown.stderr).split())}")
    return found, names


def main(paths):
    bad = 0
    for path in paths:
        found, names = wrong(path)
        bad += bool(found)
        size = path.stat().st_size / 1e6
        carries = f"kernels: {', '.join(names)}" if names else "no kernels, PyTorch runs the models"
        print(f"{path.name}, {size:.1f} MB: {'; '.join(found) or carries}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
