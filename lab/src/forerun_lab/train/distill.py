"""`forerun train draft_model`: a draft model distilled from its target.

The draft learns the target's distributions over the corpus and, on-policy, over the target's own text, because it
will draft for that text (DistillSpec, arXiv 2310.08461). With ``after`` it learns what earlier drafts miss: Stratos,
"Speculative decoding", footnote 2, trains drafts "in sequence where the k-th dataset excludes examples such that p and
any previous q_1 ... q_{k-1} predict the same output" (the boost-tuned small models of SpecInfer, arXiv 2305.09781).
The method ``merged`` drafts with all of them in one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.errors import ConfigError
from forerun.models.files.open import resolve
from forerun_lab.heads.training import overlap
from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import DistillConfig
from forerun_lab.train.corpus import describe
from forerun_lab.train.folder import save_model
from forerun_lab.train.losses import LOSSES, DistillationLoss, of_chains, round_weights, show
from forerun_lab.train.material import gather
from forerun_lab.train.rollout import continue_prompts
from forerun_lab.train.target import forward, held_out_losses
from forerun_lab.tune import loop
from forerun_lab.tune.kinds import Figures
from forerun_lab.tune.state import load_target

LOSS_LABELS = {
    "kl": loop.LossLabel("KL(target || draft), nats per token"),
    "lk": loop.LossLabel(
        "per token, in nats: KL(target || draft) and -log of the acceptance alpha, which takes over as alpha grows"
    ),
    "tv_ce": loop.LossLabel(
        "per token: 0.9 of |target - draft|, from 0 to 2, and 0.1 of the cross entropy under the target, in nats"
    ),
}


def train_draft_model(config: DistillConfig) -> Path:
    """Distil a draft; returns its folder, which transformers can load."""
    settings, material = config.settings(), gather(config, "draft_model")
    target, tokenizer, test = material.target, material.tokenizer, material.test
    draft = config.shape.build(target.config.vocab_size, tokenizer.eos_token_id, config.seed)
    inherit_embeddings(draft, target)
    earlier = [_earlier(resolve(path), tokenizer) for path in config.after]
    distance = LOSSES[config.loss]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            p_logits = forward(target, batch[:, :-1])
            earlier_logits = [forward(other, batch[:, :-1]) for other in earlier]
        q_logits = forward(model, batch[:, :-1])
        if not earlier_logits:
            return distance(p_logits, q_logits).mean()
        return mean_over(distance, p_logits, q_logits, missed(p_logits, earlier_logits))

    def evaluate(model: nn.Module) -> Figures:
        hits, overlaps = agreement(target, model, corpora.whole_rows(test[:16_385], settings.length))
        return _alpha(hits, overlaps) | of_chains(hits, overlaps)

    state = loop.run(draft, material.batches, loss, settings, evaluate, LOSS_LABELS[config.loss])
    round_weights(draft)
    figures = evaluate(draft)
    show(figures, config.progress)
    record = {
        "kind": "draft_model",
        "corpus": describe(config.corpus),
        "seed": config.seed,
        "tokens": state.tokens,
        "steps": state.steps,
        "seconds": round(state.seconds),
        "plans": state.plans,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "corpus_tokens": material.corpus_tokens,
        "held_out_tokens": len(test),
        "held_out_loss": held_out_losses(draft, test, settings),
        "alpha": measure_alpha(target, draft, test, config.seed),
        "accepted_at_0": figures["accepted_at_0"],
        "accepted_at_1": figures["accepted_at_1"],
        "coverage": coverage(target, [*earlier, draft], corpora.whole_rows(test, 512)),
        "recipe": config.recipe(),
    }
    return save_model(draft, tokenizer, config.out, record)


def _earlier(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A draft that the new one complements. Raises ConfigError if its tokenizer is not the target's."""
    draft, own_tokenizer = load_target(folder)
    if own_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"after: the draft in {folder} has another tokenizer than the target")
    return draft


@torch.no_grad()
def inherit_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Starts a draft from its target's token embeddings, projected to their principal directions. A short run sees rare
    tokens a few times only; the target has placed them already. A draft as wide as its target or more keeps its own."""
    source = target.get_output_embeddings().weight.float()
    weight = draft.get_output_embeddings().weight
    if weight.shape[1] < source.shape[1]:
        directions = torch.linalg.svd(source, full_matrices=False).Vh[: weight.shape[1]]
        weight.copy_(source @ directions.T)


def acceptance(target: nn.Module, draft: nn.Module, tokens: Tensor, skip: int = 0) -> dict[str, float]:
    """alpha of a draft over sequences, int64 [rows, length]: means over the positions from `skip` on. `t1` is the mean
    of sum min(p, q) at temperature 1, `t0` the share of positions where both have the same argmax."""
    hits, overlaps = agreement(target, draft, tokens)
    return _alpha(hits[:, skip:], overlaps[:, skip:])


def _alpha(hits: Tensor, overlaps: Tensor) -> dict[str, float]:
    return {"t1": float(overlaps.double().mean()), "t0": float(hits.double().mean())}


@torch.no_grad()
def agreement(target: nn.Module, draft: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Over sequences, int64 [rows, length]: where both have the same likeliest token, bool, and sum min(p, q)."""
    draft.eval()
    hits, overlaps = [], []
    for part in tokens.split(8):
        p_logits, q_logits = forward(target, part), forward(draft, part)
        overlaps.append(overlap(p_logits, q_logits))
        hits.append(p_logits.argmax(-1) == q_logits.argmax(-1))
    return torch.cat(hits), torch.cat(overlaps)


def measure_alpha(target: PreTrainedModel, draft: nn.Module, test: Tensor, seed: int) -> dict[str, dict[str, float]]:
    """alpha over held-out text, and over what the target writes after held-out prompts at temperatures 1 and 0."""
    prompt, new = 64, 128
    result = {"held_out_text": acceptance(target, draft, corpora.whole_rows(test, 512))}
    prompts = corpora.whole_rows(test, prompt)[:: max(1, len(test) // prompt // 64)]
    for temperature in (1.0, 0.0):
        text = continue_prompts(target, prompts, new, temperature, seed)
        result[f"generated_at_{temperature:.0f}"] = acceptance(target, draft, text, skip=prompt - 1)
    return result


def missed(p_logits: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """bool [...]: where no earlier draft's likeliest token is the target's; logits are [..., vocabulary]."""
    choice = p_logits.argmax(-1)
    by_none = torch.ones_like(choice, dtype=torch.bool)
    for q_logits in earlier:
        by_none &= q_logits.argmax(-1) != choice
    return by_none


def mean_over(distance: DistillationLoss, p_logits: Tensor, q_logits: Tensor, kept: Tensor) -> Tensor:
    """Mean of ``distance`` over the positions ``kept``, bool [...]; a scalar, 0 where there are none."""
    if not bool(kept.any()):
        return q_logits.sum() * 0.0
    return distance(p_logits[kept], q_logits[kept]).mean()


@torch.no_grad()
def coverage(target: nn.Module, drafts: Sequence[nn.Module], tokens: Tensor) -> list[float]:
    """Entry k: the share of positions of ``tokens`` int64 [rows, length] where the likeliest token of the target is
    that of one of the first k + 1 drafts, which is how often a merged tree of them holds it at temperature 0."""
    result = [0.0] * len(drafts)
    count = 0
    for part in tokens.split(8):
        choice = forward(target, part).argmax(-1)
        hit = torch.zeros_like(choice, dtype=torch.bool)
        for number, draft in enumerate(drafts):
            hit |= forward(draft, part).argmax(-1) == choice
            result[number] += float(hit.sum())
        count += choice.numel()
    return [hits / count for hits in result]
