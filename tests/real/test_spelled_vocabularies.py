"""Grammars over whole vocabularies: every added token and decomposed text, as texts that an answer must have."""

import json
import random

import pytest
import torch

from forerun import SamplingParams, StructuredOutputsParams
from forerun.core.request import RequestState
from forerun.engine.grammar import GrammarCompiler
from forerun.models.text.gguf_tokenizer import make_tokenizer

NAMES = ("qwen2", "llama-bpe", "deepseek-coder", "gpt-2")
DECOMPOSED = ["re\u0301sume\u0301.txt", "\u1112\u1161\u11ab\u1100\u1173\u11af", "A\u030angstro\u0308m", "\u212b\u2126"]


def sequence_of(output):
    return RequestState(0, [1, *output], 1, SamplingParams(), 0)


def ids(mask):
    assert mask is not None
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten().nonzero()[:, 0].tolist()


def grammars(text):
    """The text as a choice, and as a property's name, a constant and an enum; and what alone meets them."""
    value = {text: text, "of": text}
    schema = {
        "type": "object",
        "properties": {text: {"const": text}, "of": {"enum": [text]}},
        "required": [text, "of"],
        "additionalProperties": False,
    }
    written = json.dumps(value, ensure_ascii=False)
    return [
        (StructuredOutputsParams(choice=[f"a{text}b"]), f"a{text}b"),
        (StructuredOutputsParams(json=schema), written),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_added_token_and_decomposed_text_can_be_written(vocabulary, name):
    tokenizer = make_tokenizer(vocabulary(name).metadata, name)
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [eos])
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    assert added
    source = random.Random(0)
    for index, text in enumerate([*DECOMPOSED, *added]):
        for requested, expected in grammars(text):
            constraint = compiler.start(requested)
            forced = constraint.forced(sequence_of([]), 10_000)
            assert forced[-1] == eos, (text, requested.key[0])
            assert tokenizer.decode(forced[:-1]) == expected
            if index % 16 == 0:
                assert tokenizer.decode(walked(compiler, requested, eos, source)[:-1]) == expected


def walked(compiler, expected, eos, source):
    """A random way by masks, some of it committed and some drafted; whatever a mask permits is taken."""
    constraint = compiler.start(expected)
    path = []
    committed = 0
    while not path or path[-1] != eos:
        sequence = sequence_of(path[:committed])
        permitted = ids(constraint.allowed(sequence, path[committed:]))
        for token in source.sample(permitted, min(3, len(permitted))):
            assert constraint.allowed(sequence, [*path[committed:], token]) is not None
        path.append(source.choice(permitted))
        committed = source.randint(committed, len(path) - 1)
    return path
