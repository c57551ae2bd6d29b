"""A wheel for the platform that ``FORERUN_WHEEL_PLATFORM`` names, any Python 3, with kernels if there are
some for it; without that variable one without kernels, for all platforms."""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        platform = os.environ.get("FORERUN_WHEEL_PLATFORM")
        if version == "standard" and platform:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            if platform == "manylinux_2_28_x86_64":
                build_data["artifacts"].append("src/forerun/kernels/carried/*.so")
