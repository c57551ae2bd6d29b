"""transformers' modules: with random numbers, and as models without files."""

import torch

from forerun.core.batch import Batch
from forerun.models.architectures.spec import bind, refusal
from forerun.models.run.base import LoadRequest
from forerun.models.run.encdec import ModuleWeights
from forerun.models.run.native import NativeModel
from forerun.models.weights.transform import unstacked


@torch.no_grad()
def randomise(module, spread, middle=1.0):
    """Normal numbers around 0, of norms' weights around ``middle``."""
    for name, parameter in module.named_parameters():
        norm = parameter.dim() == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, middle if norm else 0.0, spread)
    module.tie_weights()


def native(module, **options):
    weights = ModuleWeights(module)
    if refusal(module.config) is None:
        weights.tensors = unstacked(weights.tensors, bind(module.config))
    return NativeModel(module.config, weights, requested(module.dtype, **options))


def requested(dtype=torch.float32, **options):
    """What is asked for of a model without files."""
    return LoadRequest(folder=None, name="t", dtype=dtype, device=torch.device("cpu"), **options)


def feed(model, attention, *spans):
    """Logits of every row of the spans."""
    for span in spans:
        span.logits = list(range(span.count))
    return model.forward(Batch(list(spans)), attention).logits
