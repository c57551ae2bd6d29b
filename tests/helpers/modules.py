"""transformers' modules: with random numbers, and as models without files."""

from itertools import pairwise

import torch

from forerun.core.batch import Batch, Span
from forerun.models.architectures.spec import bind, refusal
from forerun.models.run.base import LoadRequest, new_attention
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


def logits_of(model, tokens, cuts=(), **options):
    """Those of every row of a text, which is fed in pieces that end at ``cuts``."""
    attention = new_attention(model, max_seqs=1, max_len=64, **options)
    pieces = pairwise([0, *cuts, len(tokens)])
    return torch.cat([feed(model, attention, Span(0, start, tokens[start:end])) for start, end in pieces])


def check_chunks_and_trees(model, attention, texts, reference, close, sources=(None, None)):
    """Two texts in chunks and batches, then a tree and a chain: each row beside ``reference(index, tokens)``."""
    first, second = texts
    nodes, parents = [5, 60, 7, 80, 9, 33, 44], [-1, -1, 0, 0, 1, 4, 2]

    def span(key, start, tokens, parents=None):
        return Span(key, start, tokens, parents, source=sources[key])

    rows = [
        feed(model, attention, span(0, 0, first[:1])),
        feed(model, attention, span(0, 1, first[1:24]), span(1, 0, second[:30]))[:23],
        feed(model, attention, span(1, 30, second[30:]), span(0, 24, first[24:]))[3:],
    ]
    close(torch.cat(rows), reference(0, first))
    got = feed(model, attention, span(0, 40, nodes, parents), span(1, 33, nodes[:3]))
    for node in range(len(nodes)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        close(got[node], reference(0, first + [nodes[step] for step in path])[-1])
    close(got[len(nodes) :], reference(1, second + nodes[:3])[-3:])
