"""`forerun train draft_model`: a draft model distilled from its target.

The draft learns the target's distributions over the corpus and, on-policy, over text that the target wrote itself,
because that is what it will draft for (DistillSpec, arXiv 2310.08461). With ``after`` it learns what
earlier drafts miss.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError
from forerun.train import corpus as corpora
from forerun.train import loop
from forerun.train.boost import coverage, mean_over, missed
from forerun.train.checkpoint import RECORD, round_weights, save_model
from forerun.train.config import RunConfig, Shape
from forerun.train.losses import LOSSES, overlap
from forerun.train.on_policy import OnPolicyConfig, mixed_batches
from forerun.train.rollout import continue_prompts
from forerun.train.target import forward, held_out_losses

UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises for a folder that holds no model, a damaged one, or one of another kind."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(OnPolicyConfig):
    """What `forerun train draft_model` is told; `held_out` counts where the target's record names no files."""

    target: Path | None = None  # folder of the target; none means the bundled one
    loss: str = "lk"  # kl, lk or tv_ce
    shape: Shape = field(default_factory=lambda: Shape(128, 2, 2, 1, 384, 2048))
    tokens: int = 2_400_000
    matrix_lr: float = 0.01
    lr: float = 4e-3
    after: tuple[Path, ...] = ()  # folder of a draft that this one complements, learning where it misses (repeatable)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "after", tuple(Path(folder) for folder in self.after))
        if self.loss not in LOSSES:
            raise ConfigError(f"loss must be one of {', '.join(sorted(LOSSES))}, not {self.loss!r}")


def train_draft_model(config: DistillConfig) -> Path:
    """Distils a draft; gives its folder, which transformers can load."""
    settings = config.settings()
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = config.target or pretrained.path("target")
    target, tokenizer = load_target(folder)
    train_files, held_out = record_of(config, folder)
    stream = corpora.encode_files(train_files, tokenizer, config.seed)
    test = corpora.encode_files(held_out, tokenizer, config.seed)
    batches = mixed_batches(config, target, stream)
    draft = config.shape.build(target.config.vocab_size, tokenizer.eos_token_id, config.seed)
    inherit_embeddings(draft, target)
    earlier = [_earlier(path, tokenizer) for path in config.after]
    distance = LOSSES[config.loss]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            p_logits = forward(target, batch[:, :-1])
            theirs = [forward(other, batch[:, :-1]) for other in earlier]
        q_logits = forward(model, batch[:, :-1])
        if not theirs:
            return distance(p_logits, q_logits).mean()
        return mean_over(distance, p_logits, q_logits, missed(p_logits, theirs))

    def evaluate(model: nn.Module) -> dict[str, float]:
        return acceptance(target, model, corpora.whole_rows(test[:16_385], settings.length))

    state = loop.run(draft, batches, loss, settings, evaluate)
    round_weights(draft)
    record = {
        "kind": "draft_model",
        "corpus": corpora.describe(config.corpus),
        "seed": config.seed,
        "tokens": state.tokens,
        "steps": state.steps,
        "seconds": round(state.seconds),
        "plans": state.plans,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "corpus_tokens": len(stream),
        "held_out_tokens": len(test),
        "held_out_loss": held_out_losses(draft, test, settings),
        "alpha": measure_alpha(target, draft, test, config.seed),
        "coverage": coverage(target, [*earlier, draft], corpora.whole_rows(test, 512)),
        "recipe": config.recipe(),
    }
    return save_model(draft, tokenizer, config.out, record)


def load_target(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, bfloat16, and its tokenizer, which must have an EOS token to separate documents."""
    try:
        target = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, use_safetensors=True, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder} is not a model that can be loaded: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no EOS token to separate documents with")
    return target.eval().requires_grad_(False), tokenizer


def _earlier(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A draft that the new one complements. Raises ConfigError if it does not speak the target's tokens."""
    draft, theirs = load_target(folder)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"after: the draft in {folder} has another tokenizer than the target")
    return draft


@torch.no_grad()
def inherit_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Starts a draft from its target's token embeddings, projected to their principal directions.

    A short run sees rare tokens a few times only; the target has already placed them. A draft as wide as its target or
    wider keeps its own.
    """
    theirs = target.get_output_embeddings().weight.float()
    ours = draft.get_output_embeddings().weight
    if ours.shape[1] < theirs.shape[1]:
        directions = torch.linalg.svd(theirs, full_matrices=False).Vh[: ours.shape[1]]
        ours.copy_(theirs @ directions.T)


@torch.no_grad()
def acceptance(target: nn.Module, draft: nn.Module, tokens: Tensor, skip: int = 0) -> dict[str, float]:
    """alpha of a draft over sequences, int64 [rows, length]: means over the positions from `skip` on.

    `t1` is the mean of sum min(p, q) at temperature 1, `t0` the share of positions where both have the same argmax.
    """
    draft.eval()
    overlaps, matches, count = 0.0, 0.0, 0
    for part in tokens.split(8):
        p_logits, q_logits = forward(target, part)[:, skip:], forward(draft, part)[:, skip:]
        overlaps += float(overlap(p_logits, q_logits).sum())
        matches += float((p_logits.argmax(-1) == q_logits.argmax(-1)).sum())
        count += p_logits.shape[0] * p_logits.shape[1]
    return {"t1": overlaps / count, "t0": matches / count}


def measure_alpha(target: PreTrainedModel, draft: nn.Module, test: Tensor, seed: int) -> dict[str, dict[str, float]]:
    """alpha over held-out text, and over what the target writes after held-out prompts at temperatures 1 and 0."""
    prompt, new = 64, 128
    result = {"held_out_text": acceptance(target, draft, corpora.whole_rows(test, 512))}
    prompts = corpora.whole_rows(test, prompt)[:: max(1, len(test) // prompt // 64)]
    for temperature in (1.0, 0.0):
        text = continue_prompts(target, prompts, new, temperature, seed)
        result[f"generated_at_{temperature:.0f}"] = acceptance(target, draft, text, skip=prompt - 1)
    return result


def record_of(config: RunConfig, folder: Path) -> tuple[list[Path], list[Path]]:
    """The files that the target was trained on and those that it was not, as its record says."""
    files = corpora.list_files(config.corpus)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8")) if (folder / RECORD).exists() else {}
    names = {config.corpus / name for name in record.get("held_out_files", ())}
    held_out = [path for path in files if path in names]
    if not held_out:
        return corpora.split_files(files, config.held_out, config.seed)
    return [path for path in files if path not in names], held_out
