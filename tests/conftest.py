"""Tiny random checkpoints, saved by transformers, and engines on them."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forerun import LLM

torch.set_num_threads(1)

EOS, UNKNOWN = "<eos>", "<unk>"
ALPHABET = [EOS, UNKNOWN, "\n", " ", *string.ascii_letters, *string.digits, *string.punctuation]
CONTEXT = 256


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole conformance matrix, not a pairwise part of it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``full`` exist only with ``--full``."""
    if config.getoption("--full"):
        return
    extra = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=extra)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def save_tokenizer(folder: Path, alphabet: list[str] = ALPHABET) -> None:
    """One token per character: text is readable, and a stop string crosses tokens."""
    model = WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=UNKNOWN)
    fast.save_pretrained(folder)


def tiny_llama(layers: int = 2, **options: Any) -> LlamaForCausalLM:
    """A random Llama whose logits are peaked enough that a wrong mask or position changes its choices. Each layer
    adds less than the one before, so that a model of the first layers resembles it."""
    sizes = {
        "vocab_size": len(ALPHABET), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))
    with torch.no_grad():
        for depth, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight *= 0.5**depth
            layer.mlp.down_proj.weight *= 0.5**depth
    return model


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Llama with two layers, grouped queries, 96 tokens and a context of 256, float32."""
    folder = tmp_path_factory.mktemp("tiny_target")
    tiny_llama().save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory, tiny_target: str) -> str:
    """Folder of the target's first layer between its own embeddings and head: some drafts match, some do not."""
    folder = tmp_path_factory.mktemp("tiny_draft")
    target = LlamaForCausalLM.from_pretrained(tiny_target)
    draft = tiny_llama(layers=1)
    draft.load_state_dict(target.state_dict(), strict=False)
    draft.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llm(tiny_target: str) -> Callable[..., LLM]:
    """``llm(speculative_config=None, model=None, **options)``: an LLM on ``tiny_target``, loaded once per options."""
    loaded: dict[str, LLM] = {}

    def get(speculative_config: dict[str, Any] | None = None, model: str | None = None, **options: Any) -> LLM:
        key = json.dumps([speculative_config, model, options], sort_keys=True, default=str)
        if key not in loaded:
            loaded[key] = LLM(model or tiny_target, speculative_config=speculative_config, **options)
        return loaded[key]

    return get
