"""The inputs of every training on a target: the target, training text and held-out text."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.tune import loop
from forerun.tune.state import load_target
from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import OnPolicyConfig, RunConfig
from forerun_lab.train.files import Document, list_files, split_files
from forerun_lab.train.folder import RECORD
from forerun_lab.train.identity import claim, target_folder
from forerun_lab.train.on_policy import mixed_batches


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
    ModelError or ConfigError for a folder without a usable target, ConfigError for a missing corpus and for a folder
    with another run."""
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
