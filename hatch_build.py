"""A wheel that carries compiled kernels is for this platform, any Python 3; one without is for all."""

import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "standard" and any(Path(self.root, "src/forerun/kernels/carried").glob("*.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
