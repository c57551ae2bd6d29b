"""`forerun train medusa2`: heads trained together with a copy of their target, which then is the target.

Cai et al., arXiv 2401.10774, section 2.2.2: the heads learn alone first, then heads and copy learn together on
L = L_LM + head_weight * sum_k 0.8^k L_k, the copy at a smaller learning rate. With ``self_distillation`` (section
2.3.2) L_LM is KL(original || copy), so that the copy answers nearly as the original does; otherwise it is the next
token's cross entropy. Speculation is lossless with respect to the copy, not to the original.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from forerun.core.errors import ConfigError
from forerun.models.files.open import Checkpoint, resolve
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.heads.training import weights
from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import JointConfig
from forerun_lab.train.corpus import describe, names
from forerun_lab.train.folder import save_model
from forerun_lab.train.heads import loss_label
from forerun_lab.train.losses import kl, round_weights, show
from forerun_lab.train.material import gather, lesson, view
from forerun_lab.train.target import held_out_losses
from forerun_lab.tune import loop
from forerun_lab.tune.kinds import Figures, evaluate_head


class Joint(nn.Module):
    """A copy of the target and the heads on it."""

    def __init__(self, target: PreTrainedModel, head: MedusaHead) -> None:
        super().__init__()
        self.target = target
        self.head = head


def joint_losses(model: Joint, batch: Tensor, original: PreTrainedModel | None) -> tuple[Tensor, Tensor]:
    """The copy's own loss and the heads', both means in nats, of token ids [rows, length + 1]. The copy's is
    KL(``original`` || copy), or the next token's cross entropy without an original. The heads learn the copy's
    distributions, which are detached; the copy's states and output layer do learn from the heads' loss."""
    seen = view(model.target, batch)
    with torch.autocast(batch.device.type, torch.bfloat16):
        heads = model.head.loss(replace(seen, logits=seen.all_target_logits().detach()))
    if original is not None:
        own = kl(lesson(original, batch).all_target_logits(), seen.all_target_logits()).mean()
    else:
        own = functional.cross_entropy(seen.all_target_logits()[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    return own, heads


def train_joint(config: JointConfig) -> Path:
    """Train heads and copy; returns ``out``. ``out/target`` is a checkpoint like any other, ``out/head`` its head."""
    material = gather(config, "medusa2")
    original, batches, test = material.target, material.batches, material.test
    model = _copy_with_heads(original, config)
    settings = config.settings()
    rows = corpora.whole_rows(test, settings.length + 1)[:8]
    figures: dict[str, Figures] = {}

    def head_loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, Joint)
        with torch.autocast(batch.device.type, torch.bfloat16):
            return model.head.loss(lesson(model.target, batch))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, Joint)
        own, heads = joint_losses(model, batch, original if config.self_distillation else None)
        return own + config.head_weight * heads

    def evaluate(model: nn.Module) -> Figures:
        return _evaluate(model, original, rows) | accepted(model, rows)

    warmed = loop.State()
    if config.warmup_tokens:
        figures["untrained"] = _evaluate(model, original, rows)
        warm = replace(settings, out=config.out / "run" / "heads", tokens=config.warmup_tokens)
        warmed = loop.run(model, batches, head_loss, warm, evaluate, loss_label(model.head))
    figures["after_warmup"] = _evaluate(model, original, rows)
    model.requires_grad_(True)
    plan = replace(settings, out=config.out / "run" / "joint", rates={"target.": config.backbone_rate})
    state = loop.run(model, batches, loss, plan, evaluate, _loss_label(config))
    round_weights(model)
    result = accepted(model, corpora.whole_rows(test, settings.length + 1)[:32])
    show(result, config.progress)
    figures["trained"] = _evaluate(model, original, rows)
    trained = {"tokens": warmed.tokens + state.tokens, "figures": figures, **result}
    record = {
        **trained,
        "kind": "medusa2",
        "original": str(config.target or "forerun:target"),
        "corpus": describe(config.corpus),
        "seed": config.seed,
        "steps": warmed.steps + state.steps,
        "seconds": round(warmed.seconds + state.seconds),
        "plans": state.plans,
        "parameters": sum(parameter.numel() for parameter in model.target.parameters()),
        "corpus_tokens": material.corpus_tokens,
        "held_out_files": names(material.held_out, config.corpus),
        "held_out_tokens": len(test),
        "held_out_loss": held_out_losses(model.target, test, settings),
        "recipe": config.recipe(),
    }
    folder = save_model(model.target, material.tokenizer, config.out / "target", record)
    model.head.save(
        config.out / "head",
        {"target": str(folder), "target_fingerprint": Checkpoint.at(folder).fingerprint(), **trained},
    )
    return config.out


def _copy_with_heads(original: PreTrainedModel, config: JointConfig) -> Joint:
    """A float32 copy, frozen so far, and untrained heads, or those that ``config`` names."""
    text = original.config.get_text_config()
    torch.manual_seed(config.seed)
    sizes = Sizes(text.hidden_size, text.vocab_size, text.num_hidden_layers, config.depth)
    head = MedusaHead(sizes)
    if config.head is not None:
        result = MedusaHead.load(resolve(config.head))
        if result.sizes != sizes:
            raise ConfigError(f"the head in {config.head} has other sizes than asked for: {result.sizes}, not {sizes}")
        head.load_state_dict(result.tensors)
    copy = deepcopy(original)
    nn.Module.to(copy, torch.float32)
    return Joint(copy.requires_grad_(False), head)


def accepted(model: nn.Module, rows: Tensor) -> Figures:
    """Loss and acceptance of the heads' drafts by position."""
    assert isinstance(model, Joint)
    with torch.autocast(rows.device.type, torch.bfloat16):
        result = evaluate_head(lambda row: model.head.guesses(lesson(model.target, row)), rows)
    return {name: result[name] for name in ("loss_by_position", "accepted_at_0", "accepted_at_1")}


def _loss_label(config: JointConfig) -> loop.LossLabel:
    own = "KL(original || copy)" if config.self_distillation else "cross entropy of the copy's next token"
    parts = ", ".join(f"{fraction:.2g}" for fraction in weights(config.depth))
    return loop.LossLabel(
        f"nats per token: {own}, and {config.head_weight:g} of the sum of the heads' cross entropies under the copy's "
        f"distribution, the tokens ahead weighted {parts}"
    )


@torch.no_grad()
def _evaluate(model: nn.Module, original: PreTrainedModel, rows: Tensor) -> Figures:
    """On held-out rows: the copy's loss, the heads', and the copy's distance from the original, nats per token."""
    assert isinstance(model, Joint)
    language, heads = joint_losses(model, rows, None)
    distance, _ = joint_losses(model, rows, original)
    return {"loss": float(language), "head_loss": float(heads), "distance": float(distance)}
