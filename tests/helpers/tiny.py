"""Tiny random checkpoints."""

import string

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE, WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, UNKNOWN = "<eos>", "<unk>"
ALPHABET = [EOS, UNKNOWN, "\n", " ", *string.ascii_letters, *string.digits, *string.punctuation]
CONTEXT = 256
HEAD = 16
"""Numbers in a head, so that the kernels serve it."""
WIDE = 1026
"""Heads that the attention kernel does not serve: such a model runs layer by layer."""


def save_tokenizer(folder, alphabet=ALPHABET, unknown=UNKNOWN):
    """One token per character: text is readable, and a stop string crosses tokens."""
    model = WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # one that grammars can read
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=unknown)
    fast.save_pretrained(folder)


def byte_tokenizer(texts, size, special, **options):
    """As GPT-2, Llama 3 and Qwen: tokens are pieces of UTF-8, learnt from ``texts``, behind the ``special`` ones, of
    which the first ends a text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], **options)


def save_checkpoint(module, folder, alphabet=ALPHABET, **options):
    """Weights, config and tokenizer; returns the folder as text."""
    module.save_pretrained(folder)
    save_tokenizer(folder, alphabet, **options)
    return str(folder)


def tiny_llama(layers=2, **options):
    """A random Llama whose logits are peaked enough that a wrong mask or position changes its choices. Each layer
    adds less than the one before, so that a model of the first layers resembles it."""
    sizes = {
        "vocab_size": len(ALPHABET), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "max_position_embeddings": CONTEXT,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))
    with torch.no_grad():
        for depth, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight *= 0.5**depth
            layer.mlp.down_proj.weight *= 0.5**depth
    return model
