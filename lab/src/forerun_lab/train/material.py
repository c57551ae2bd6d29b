"""The inputs of every training on a target: the target, training text, also of its own, and held-out text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun_lab.heads.training import TrainingBatch
from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import OnPolicyConfig, RunConfig
from forerun_lab.train.corpus import Document, list_files, split_files
from forerun_lab.train.folder import RECORD
from forerun_lab.train.identity import claim, target_folder
from forerun_lab.train.rollout import read, rollout_stream, save
from forerun_lab.tune import loop
from forerun_lab.tune.state import load_target


@dataclass(frozen=True)
class DataMixture:
    """Sequences of two streams: `share` of every batch comes from the second."""

    first: loop.Batches
    second: loop.Batches
    share: float

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Token ids, int64 [rows, length + 1]."""
        others = round(rows * self.share)
        parts = [
            stream.batch(int(consumed * fraction), count, length)
            for stream, fraction, count in (
                (self.first, 1 - self.share, rows - others),
                (self.second, self.share, others),
            )
            if count
        ]
        return torch.cat(parts)


def mixed_batches(config: OnPolicyConfig, target: PreTrainedModel, stream: Tensor) -> loop.Batches:
    """The corpus ``stream``, int32 [tokens], with ``generated_share`` of every batch from the target's own text.

    Raises ConfigError if ``generated`` names no readable text."""
    batches: loop.Batches = corpora.TokenStream(stream, config.seed)
    if not config.generated_share or (config.generated is None and not config.generated_tokens):
        return batches
    generated = _generated(config, target, stream)
    return DataMixture(batches, corpora.TokenStream(generated, config.seed), config.generated_share)


def _generated(config: OnPolicyConfig, target: PreTrainedModel, stream: Tensor) -> Tensor:
    """On-policy text, int32 [tokens], written once per run."""
    path = config.generated or config.out / "run" / "generated.pt"
    if config.generated or (config.resume and path.exists()):
        return read(path)
    rounds = path.with_suffix("")
    rounds.mkdir(parents=True, exist_ok=True)
    greedy = int(config.generated_tokens * config.greedy_share)
    parts = [
        rollout_stream(target, stream, tokens, temperature, config.seed, rounds, config.pause_file, config.progress)
        for tokens, temperature in ((greedy, 0.0), (config.generated_tokens - greedy, 1.0))
        if tokens
    ]
    generated = torch.cat(parts)
    save(generated, path)
    rmtree(rounds)
    return generated


@dataclass(frozen=True)
class TrainingMaterial:
    """The frozen target and its texts, token ids int32 [tokens] where they are whole."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batches: loop.Batches  # the corpus, and what the target wrote itself
    corpus_tokens: int
    held_out: list[Document]
    test: Tensor  # the held-out files


def gather(config: OnPolicyConfig, method: str) -> TrainingMaterial:
    """Load the target, read the corpus and, if requested, let the target write text; sets torch's threads. Raises
    ModelError or ConfigError for an unusable target, ConfigError for a missing corpus and for another run's folder."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = target_folder(config.target)
    target, tokenizer = load_target(folder)
    train_files, held_out = record_of(config, folder)
    stream = corpora.encode_files(train_files, tokenizer, config.seed)
    test = corpora.encode_files(held_out, tokenizer, config.seed)
    claim(config, method, (stream, test), folder)
    return TrainingMaterial(target, tokenizer, mixed_batches(config, target, stream), len(stream), held_out, test)


def record_of(config: RunConfig, folder: Path) -> tuple[list[Document], list[Document]]:
    """The files that the target was trained on, and the held-out ones, from its record."""
    files = list_files(config.corpus)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8")) if (folder / RECORD).exists() else {}
    names = {config.corpus / name for name in record.get("held_out_files", ())}
    held_out: list[Document] = [path for path in files if path in names]
    if not held_out:
        return split_files(files, config.held_out, config.seed)
    return [path for path in files if path not in names], held_out


def lesson(target: PreTrainedModel, tokens: Tensor, exit_layer: int | None = None) -> TrainingBatch:
    """The frozen target's hidden states and logits of token ids [rows, length]. With ``exit_layer``, that layer's
    output through the final norm replaces the last hidden state."""
    with torch.no_grad():
        return view(target, tokens, exit_layer)


def view(target: PreTrainedModel, tokens: Tensor, exit_layer: int | None = None) -> TrainingBatch:
    """``lesson`` with gradients through the target, where they are on."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        out = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden = {index: state.float() for index, state in enumerate(out.hidden_states)}
        if exit_layer is not None:
            hidden[len(hidden) - 1] = target.get_decoder().norm(out.hidden_states[exit_layer]).float()
    embedding: Any = target.get_input_embeddings().weight
    head: Any = target.get_output_embeddings().weight
    return TrainingBatch(
        tokens=tokens,
        hidden=hidden,
        logits=out.logits.float(),
        embedding=embedding.float(),
        head=head.float(),
        target=target,
    )
