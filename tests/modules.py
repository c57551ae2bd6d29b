"""Models of modules in memory, without files."""

from forerun.models.architectures.spec import applies, bind
from forerun.models.native import NativeModel
from forerun.models.weights import unstacked


class ModuleWeights:
    """A module's, by their names in a checkpoint."""

    nbytes = 0

    def __init__(self, module):
        result = dict(module.named_parameters(remove_duplicate=False))
        self.found = unstacked(result, bind(module.config)) if applies(module.config) is None else result

    def __contains__(self, name):
        return name in self.found

    def values(self, name):
        return self.found[name].detach()

    def blocks(self, name):
        return None

    def release(self):
        return 0


def native(module, **options):
    return NativeModel(module.config, ModuleWeights(module), dtype=module.dtype, device=module.device, **options)
