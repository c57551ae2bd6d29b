"""Models of modules in memory, without files."""

from forerun.models.architectures.spec import applies, bind
from forerun.models.encdec import ModuleWeights
from forerun.models.native import NativeModel
from forerun.models.weights import unstacked


def native(module, **options):
    weights = ModuleWeights(module)
    if applies(module.config) is None:
        weights.found = unstacked(weights.found, bind(module.config))
    return NativeModel(module.config, weights, dtype=module.dtype, device=module.device, **options)
