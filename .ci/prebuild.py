"""``python .ci/prebuild.py PLATFORM FOLDER``: compile the kernels that a platform's wheel carries, with ziglang."""

import shutil
import sys
from pathlib import Path

from forerun import kernels

TARGETS = {
    "manylinux_2_28_x86_64": ("x86_64-linux-gnu.2.28", "avx2"),
    "manylinux_2_28_aarch64": ("aarch64-linux-gnu.2.28", "asimd"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", "asimd"),
}
"""By platform tag: what ziglang compiles for, and the processor feature that its variants share."""


def prebuild(platform, folder):
    """Compile into ``folder`` what the wheel of a platform carries, which may be nothing; what is up to date stays."""
    folder.mkdir(parents=True, exist_ok=True)
    target, shared = TARGETS.get(platform, ("", None))
    names = [name for name, (needed, _) in kernels.VARIANTS.items() if shared in needed]
    assert (shared is None) == (not names), f"no variant needs {shared}"
    variants = {kernels.prebuilt(name, folder): kernels.VARIANTS[name][1] for name in names}
    for other in set(folder.iterdir()) - set(variants):  # of other sources
        shutil.rmtree(other) if other.is_dir() else other.unlink()
    zig = kernels.zig()
    for path, machine in variants.items():
        if path.is_file() and kernels.intact(path):
            continue
        if not zig:
            raise SystemExit("wheels are compiled by ziglang: pip install 'forerun[compiler]'")
        flags = ("-target", target, zig_flag(machine))
        title, whole = f"Compiling {path.name} for {platform}", kernels.Library(path, kernels.all_units())
        for error in kernels.compile_kernels(zig, [whole], flags, timeout=None, title=title).values():
            raise error


def zig_flag(machine):
    """A variant's processor flags in ziglang's form."""
    features = (flag.removeprefix("-march=").removeprefix("-mcpu=").removeprefix("-m") for flag in machine)
    return f"-mcpu={'+'.join(features).replace('-', '_')}"


if __name__ == "__main__":
    prebuild(sys.argv[1], Path(sys.argv[2]))
