"""A row's bits do not depend on what it is computed beside."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forerun.core.batch import Batch, Output, Span
from forerun.models import native
from forerun.models.base import new_cache
from forerun.models.hf import HFModel
from forerun.models.invariance import self_test
from forerun.models.linear import can_pack
from forerun.models.native import NativeModel
from forerun.models.streamed import can_stream
from here import NO_PACKING, where

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 352, "max_position_embeddings": 1024,
}  # fmt: skip
PLAIN, PACKED, STREAMED = ({"weights": how} for how in ("plain", "packed", "streamed"))


def build(kind: str = "llama", dtype: torch.dtype = torch.float32, invariant: bool = True, **options):
    torch.manual_seed(0)
    if kind == "qwen3":
        module = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))
    else:
        config = LlamaConfig(**SIZES)
        module = LlamaForCausalLM._from_config(config, attn_implementation="forerun" if kind == "hf" else "sdpa")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    cls = HFModel if kind == "hf" else NativeModel
    return cls(module.to(dtype).eval(), name="t", eos_ids=frozenset(), invariant=invariant, **options)


MODELS = {
    "float32": (build, ("llama", torch.float32), PLAIN),
    "float32-packed": (build, ("llama", torch.float32), PACKED),
    "float32-streamed": (build, ("llama", torch.float32), STREAMED),
    "qwen3-float32": (build, ("qwen3", torch.float32), {}),
    "hf-float32": (build, ("hf", torch.float32), {}),
    "bfloat16": (build, ("llama", torch.bfloat16), PLAIN),
    "bfloat16-packed": (build, ("llama", torch.bfloat16), PACKED),
    "bfloat16-streamed": (build, ("llama", torch.bfloat16), STREAMED),
    "qwen3-bfloat16": (build, ("qwen3", torch.bfloat16), {}),
    "hf-bfloat16": (build, ("hf", torch.bfloat16), {}),
}


MODELS = {name: how for name, how in MODELS.items() if how[2] != PACKED or can_pack(how[1][1])}
MODELS = {name: how for name, how in MODELS.items() if how[2] != STREAMED or can_stream(how[1][1])}
"""What this torch runs on this processor."""


def model_of(name: str):
    make, arguments, options = MODELS[name]
    return make(*arguments, **options)


@pytest.mark.usefixtures("cpu_attention")
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", MODELS)
def test_the_self_test_finds_nothing(name, page_size):
    assert self_test(model_of(name), page_size=page_size) == []


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name == "float32" or "-packed" in name or "-streamed" in name]
)
@pytest.mark.usefixtures("cpu_attention")
def test_many_rows(name):
    model, generator = model_of(name), torch.Generator().manual_seed(3)
    tokens = torch.randint(512, (131,), generator=generator).tolist()

    def feed(cuts: list[int], mates: bool = False) -> torch.Tensor:
        cache = new_cache(model, max_seqs=2, max_len=131)
        rows, start, fed = [], 0, 0
        for end in cuts:
            spans = [Span(0, start, tokens[start:end], logits=list(range(end - start)))]
            if mates:
                count = 1 + (end * 7) % 5
                spans.insert(0, Span(1, fed, tokens[fed : fed + count]))
                fed += count
            rows.append(model.forward(Batch(spans), cache).logits)
            start = end
        return torch.cat(rows)

    singly = feed(list(range(1, 132)))
    assert torch.equal(singly, feed([131]))
    for rows in (3, 5, 8):
        assert torch.equal(singly, feed([*range(rows, 131, rows), 131]))
    ragged = sorted({*torch.randint(1, 131, (20,), generator=generator).tolist(), 131})
    assert torch.equal(singly[:100], feed([end for end in ragged if end < 100] + [100], mates=True))


def test_the_self_test_reports_a_dependence():
    class Leaky:
        """Adds to every row something that depends on how many rows there are."""

        def __init__(self, model):
            self.model, self.info = model, model.info
            self.invariant, self.row_multiple, self.key_multiple = True, model.row_multiple, model.key_multiple

        def forward(self, batch, cache):
            out = self.model.forward(batch, cache)
            return Output(out.logits + (1e-7 * (batch.num_rows > 4)))

    failures = self_test(Leaky(build()))
    assert any("prefill in one chunk" in failure for failure in failures)


def test_a_context_shorter_than_the_probe():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 32})
    assert self_test(NativeModel(LlamaForCausalLM(config), name="t", eos_ids=frozenset(), invariant=True)) == []


@pytest.mark.parametrize("dtype", where(can_pack, (torch.float32, torch.bfloat16), NO_PACKING))
def test_padding_to_more_rows_than_needed_changes_no_bit(monkeypatch, dtype):
    fewest = build("llama", dtype, weights="packed")
    monkeypatch.setattr(native, "quickest_rows", lambda layers, fewest: 4)
    more = build("llama", dtype, weights="packed")
    assert self_test(more) == []
    logits = []
    for model in (fewest, more):
        cache = new_cache(model, max_seqs=1, max_len=64)
        steps = [[3, 4, 5, 6, 7], [8], [9, 10], [11]]
        starts = [0, 5, 6, 8]
        spans = [Span(0, start, tokens, logits=[len(tokens) - 1]) for start, tokens in zip(starts, steps)]
        logits.append(torch.cat([model.forward(Batch([span], model.info.device), cache).logits for span in spans]))
    assert torch.equal(*logits)
