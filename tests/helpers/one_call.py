"""All layers in one compiled call against the same kernels layer by layer."""

import torch

from forerun.core.batch import Batch, Span
from forerun.core.inference import inference
from forerun.models.run.base import new_attention


def some_ids(model, count, seed):
    return torch.randint(2, model.info.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@inference
def check(model):
    """The same bits of logits and hidden states, of chunks, mates, a tree, two layers alone, and rows that are no
    token's embedding, where it takes some. Leaves the model without the call."""
    assert model.fused is not None
    prompts, nodes = [some_ids(model, 30, 0), some_ids(model, 9, 1)], some_ids(model, 6, 2)
    embeds = torch.randn(2, model.info.hidden_size)
    some = min(2, model.info.num_layers - 1)
    result = []
    for _ in range(2):
        attention = new_attention(model, max_seqs=2, max_len=64, page_size=4)
        tree = Span(0, 30, nodes, [-1, 0, 0, 1, 2, 2], logits=[0, 2, 3])
        batches = [
            Batch([Span(0, 0, prompts[0], logits=[29]), Span(1, 0, prompts[1])], hidden=(0, some, some + 1)),
            Batch([tree, Span(1, 9, [5], logits=[0])], hidden=(1,)),
            Batch([Span(1, 10, [6, 7])]),
            Batch([Span(1, 12, [6, 7], logits=[1])], layers=(0, some), hidden=(some, some + 1)),
        ]
        if model._table is None:
            rows = Span(1, 12, [6, 7, 8], logits=[0, 1, 2])
            batches.append(Batch([rows], embeds=embeds, embed_rows=[0, 2]))
        result.append([model.forward(batch, attention) for batch in batches])
        model.fused = None
    for one, many in zip(*result, strict=True):
        assert torch.equal(one.logits, many.logits)
        assert one.experts == many.experts
        assert one.hidden.keys() == many.hidden.keys()
        assert all(torch.equal(one.hidden[layer], many.hidden[layer]) for layer in one.hidden)
