"""The target's own text mixed into a corpus, because a drafter drafts for that text (DistillSpec, arXiv 2310.08461)."""

from dataclasses import dataclass
from shutil import rmtree

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.tune import loop
from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import OnPolicyConfig
from forerun_lab.train.rollout import read, rollout_stream, save


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
