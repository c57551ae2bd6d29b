"""`forerun train target`: a small language model and its tokenizer, from a folder of text files."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import TargetConfig
from forerun_lab.train.corpus import Document, describe, list_files, names, read_text, split_files
from forerun_lab.train.folder import save_model, train_tokenizer
from forerun_lab.train.identity import claim
from forerun_lab.train.losses import round_weights
from forerun_lab.tune import loop
from forerun_lab.tune.config import LoopSettings

LOSS_LABEL = loop.LossLabel("cross entropy of the next token, nats per token")


def train_target(config: TargetConfig) -> Path:
    """Trains tokenizer and model; gives the folder, which transformers can load."""
    settings = config.settings()
    train_files, held_out = split_files(list_files(config.corpus), config.held_out, config.seed)
    claim(config, "target", map(read_text, (*train_files, *held_out)))
    tokenizer = _tokenizer(config, train_files)
    train = corpora.TokenStream(corpora.encode_files(train_files, tokenizer, config.seed), config.seed)
    test = corpora.encode_files(held_out, tokenizer, config.seed)
    model = config.shape.build(len(tokenizer), tokenizer.eos_token_id, config.seed)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"held_out_loss": held_out_loss(model, test[:16_385], settings.length)}

    state = loop.run(model, train, next_token_loss, settings, evaluate, LOSS_LABEL)
    round_weights(model)
    record = {
        "kind": "target",
        "corpus": describe(config.corpus),
        "seed": config.seed,
        "tokens": state.tokens,
        "steps": state.steps,
        "seconds": round(state.seconds),
        "plans": state.plans,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus_tokens": len(train.tokens),
        "held_out_tokens": len(test),
        "held_out_files": names(held_out, config.corpus),
        "held_out_loss": held_out_losses(model, test, settings),
        "recipe": config.recipe(),
    }
    return save_model(model, tokenizer, config.out, record)


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next token, nats; `batch` is int64 [rows, length + 1]."""
    return functional.cross_entropy(forward(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def forward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits, float32 [rows, length, vocabulary], of a causal language model in bfloat16 autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits.float()


@torch.no_grad()
def held_out_loss(model: nn.Module, stream: Tensor, length: int) -> float:
    """Mean cross entropy, nats per token, of a stream of tokens cut into sequences of `length`."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, length):
        window = stream[start : start + length + 1].long()[None]
        total += float(next_token_loss(model, window)) * (window.shape[1] - 1)
        count += window.shape[1] - 1
    return total / count


def held_out_losses(model: nn.Module, stream: Tensor, settings: LoopSettings) -> dict[str, float]:
    """Held-out loss, nats per token, by the length of the sequences that it was measured in."""
    return {str(length): held_out_loss(model, stream, length) for length in (settings.length, settings.long_length)}


def _tokenizer(config: TargetConfig, files: list[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of a run that goes on, or a new one."""
    folder = config.out / "run" / "tokenizer"
    if config.resume and folder.exists():
        kept: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
        return kept
    texts = (read_text(path) for path in files)
    tokenizer = train_tokenizer(texts, config.vocab_size, config.shape.positions)
    tokenizer.save_pretrained(folder)
    return tokenizer
