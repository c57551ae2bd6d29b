"""``python -m forerun.kernels PLATFORM FOLDER``: compile the kernels that a platform's wheel carries."""

import sys
from pathlib import Path

from forerun.kernels import prebuild

prebuild(sys.argv[1], Path(sys.argv[2]))
