"""A wheel for the platform that ``FORERUN_WHEEL_PLATFORM`` names, any Python 3, with the kernels that ``make wheels``
compiled for it; without that variable one without kernels, for all platforms."""

import os
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        platform = os.environ.get("FORERUN_WHEEL_PLATFORM")
        if version == "standard" and platform:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            for path in Path(self.root, "build", "kernels", platform).glob("*.so"):
                build_data["force_include"][str(path)] = f"forerun/kernels/carried/{path.name}"
