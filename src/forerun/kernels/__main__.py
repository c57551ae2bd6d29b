"""``python -m forerun.kernels``: compile the kernels that a platform wheel carries."""

from forerun.kernels import carry

carry()
