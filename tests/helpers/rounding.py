"""How far two computations of one model may lie apart: a bound from its dtype, depth and sizes."""

import math

import torch

from forerun.models.architectures.spec import bind

SUMS = 6
"""Sums that follow one another in a layer: queries and keys, scores, values, output, gate and up, down."""


def apart(got, expected):
    """The largest difference, over the largest expected number."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def bound(config, dtype=torch.float32):
    """For ``apart``: eps sqrt(n) ((6 + s) layers + 1). A sum of n products rounds n times, by half of eps of what is
    there: by sqrt(n) eps / 2, if those errors are as good as random. All sums of the layers and the output layer's add
    theirs, in both computations. A score's error is s times larger, if s is the size of scores, because its exponential
    is taken: heads whose numbers are around 1 have scores up to the scale times their width."""
    spec, longest = bind(config), max(config.hidden_size, config.intermediate_size)
    width = max(spec.at(index).head_dim for index in range(len(spec.layers)))
    scores = spec.scale * (width if spec.latent is None else spec.latent.query_dim)
    return torch.finfo(dtype).eps * math.sqrt(longest) * ((SUMS + scores) * len(spec.layers) + 1)


def by_chance(count):
    """How many times as large as another an error may be, if both are norms of ``count`` rows and round alike. Such a
    norm's standard deviation is 1/sqrt(2 count) of it, that of two norms' ratio 1/sqrt(count): four of these."""
    return 1 + 4 / math.sqrt(count)


def rounded_inputs(module, size=None, weights=False):
    """``module``, whose linear layers round each ``size`` inputs, or each row, to 127 steps of the largest; with
    ``weights``, each row of them, too."""

    def steps(x):
        count = size or x.shape[-1]
        parts = torch.nn.functional.pad(x, (0, -x.shape[-1] % count)).unflatten(-1, (-1, count))
        step = (parts.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        return ((parts / step).round() * step).flatten(-2)[..., : x.shape[-1]]

    for each in module.modules():
        if isinstance(each, torch.nn.Linear):
            each.register_forward_pre_hook(lambda _, given: (steps(given[0]),))
            if weights:
                each.weight.data = steps(each.weight.data)
    return module
