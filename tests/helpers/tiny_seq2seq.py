"""Tiny random encoder-decoders with the alphabet of ``tiny.py``, saved by transformers."""

from functools import cache

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from tiny import ALPHABET, save_checkpoint

EOS, START, FORCED = 0, 1, 5
POSITIONS = 128
T5 = {
    "vocab_size": len(ALPHABET), "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_decoder_layers": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "eos_token_id": EOS, "pad_token_id": START, "decoder_start_token_id": START,
}  # fmt: skip
BART = {
    "vocab_size": len(ALPHABET), "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": POSITIONS, "scale_embedding": True, "eos_token_id": EOS, "pad_token_id": START,
    "decoder_start_token_id": START, "bos_token_id": FORCED, "forced_eos_token_id": None,
}  # fmt: skip
KINDS = {
    "t5": lambda **more: T5ForConditionalGeneration(T5Config(**{**T5, **more})),
    "flan": lambda **more: T5ForConditionalGeneration(
        T5Config(**{**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **more})
    ),
    "mt5": lambda **more: MT5ForConditionalGeneration(
        MT5Config(**{**T5, "num_heads": 6, "feed_forward_proj": "gated-gelu", **more})
    ),
    "bart": lambda **more: BartForConditionalGeneration(BartConfig(**{**BART, **more})),
}
"""The relative-position kinds: ReLU and a tied head that is scaled; a gated GELU and a head of its own; heads that do
not add up to the model's width. And learned positions, norms behind with biases, a bias of logits."""

SPREADS = {"relative": 1.0, "lm_head": 0.5, "shared": 0.15, ".q.": 0.1}
"""Of weights, by a part of their names: T5 does not divide the products of queries and keys."""


def save_seq2seq(kind, folder, **more):
    """Random weights, large enough that a wrong mask, position or source changes choices. Returns the folder."""
    torch.manual_seed(1)
    model = KINDS[kind](**more)
    if kind == "flan":
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            spread = next((spread for part, spread in SPREADS.items() if part in name), 0.3)
            torch.nn.init.normal_(parameter, center, spread)
        if kind == "bart":
            model.final_logits_bias.normal_(0.0, 0.1)
    model.generation_config.decoder_start_token_id = START
    return save_checkpoint(model, folder)


@cache
def theirs(folder, dtype=torch.float32):
    """The checkpoint in transformers' own hands."""
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def reference(folder, source, tokens, dtype=torch.float32):
    """transformers' logits [tokens, vocabulary]."""
    ids, answer = torch.tensor([source]), torch.tensor([tokens])
    return theirs(folder, dtype)(input_ids=ids, decoder_input_ids=answer, use_cache=False).logits[0]


def some_tokens(count, seed=0):
    return torch.randint(2, len(ALPHABET), (count,), generator=torch.Generator().manual_seed(seed)).tolist()
