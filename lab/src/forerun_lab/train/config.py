"""Configurations of the training commands, and the shape of a model that is trained from scratch."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.config import option
from forerun.core.errors import ConfigError
from forerun.measure.prompts import standard_library
from forerun_lab.tune.config import LoopSettings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HEAD_NAMES = ("medusa", "blockwise", "dflash", "eagle", "parallel", "lookahead", "layerskip")
LOSS_NAMES = ("kl", "lk", "tv_ce")


@dataclass(frozen=True)
class ModelShape:
    """Size of a Llama model with tied embeddings."""

    hidden_size: int = option(384, "Hidden size.")
    layers: int = option(6, "Number of layers.")
    heads: int = option(6, "Number of attention heads.")
    kv_heads: int = option(2, "Number of key/value heads.")
    intermediate_size: int = option(1024, "Intermediate size of the MLP.")
    positions: int = option(2048, "Maximum context length, in tokens.")

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ConfigError(f"every size of a model must be at least 1: {self}")
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                f"hidden_size must be an even multiple of heads, and heads a multiple of kv_heads: {self}"
            )

    def build(self, vocab_size: int, eos_token_id: int, seed: int) -> LlamaForCausalLM:
        """A model of this shape with random weights."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.positions,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that all training commands share. Counts are in tokens unless they say otherwise."""

    out: Path = option(MISSING, "Folder for the finished model. Its run folder keeps what resuming needs.")
    corpus: Path = field(default_factory=standard_library, metadata={"help": "Folder of text files, or one file."})
    held_out: int | None = option(None, "Files to exclude from training. Default: 25, or a tenth of fewer than 250.")
    shape: ModelShape = field(default_factory=ModelShape)
    tokens: int = option(9_000_000, "Tokens to train on. A smaller number on resume starts the decay earlier.")
    batch_tokens: int = option(4096, "Tokens per optimizer step.")
    length: int = option(512, "Tokens per training sequence.")
    long_share: float = option(0.1, "Share of the run with sequences as long as the context.")
    decay_share: float = option(0.65, "Share of the run over which learning rates decay to zero.")
    matrix_lr: float = option(0.006, "Peak learning rate of hidden matrices (Muon).")
    lr: float = option(2e-3, "Peak learning rate of all other parameters (AdamW).")
    seed: int = option(0, "Random seed.")
    threads: int = option(2, "CPU threads. 0: torch's default.")
    resume: bool = option(True, "Resume from a checkpoint in --out.")
    pause_file: Path | None = option(None, "Pause while this file exists.")
    eval_tokens: int = option(200_000, "Tokens between two evaluations on held-out text.")
    progress: bool = option(True, "Show progress bars.")

    def settings(self) -> LoopSettings:
        """The settings of the training loop: options of the same name, and what follows from others."""
        same = {item.name: getattr(self, item.name) for item in fields(LoopSettings) if hasattr(self, item.name)}
        same |= {"length": min(self.length, self.shape.positions), "long_length": self.shape.positions}
        same |= {"out": self.out / "run", "micro_tokens": min(self.batch_tokens, 4096)}
        return LoopSettings(**same)

    def recipe(self) -> dict[str, Any]:
        """The options that the result depends on, for the record beside the weights."""
        local = ("out", "corpus", "target", "resume", "pause_file", "progress")
        return {key: _plain(value) for key, value in asdict(self).items() if key not in local}


@dataclass(frozen=True, kw_only=True)
class TargetConfig(RunConfig):
    """Options of `forerun train target`."""

    vocab_size: int = option(4096, "Vocabulary size of the tokenizer.")

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise ConfigError(f"vocab_size must be at least 257, all bytes and an end-of-text token: {self.vocab_size}")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(RunConfig):
    """Options of trainings that learn from a target's own text too."""

    target: Path | None = option(None, "Folder of the target. Default: the bundled one.")
    generated_tokens: int = option(400_000, "Tokens of text that the target generates before training. 0: none.")
    generated_share: float = option(0.5, "Share of training sequences taken from it.")
    greedy_share: float = option(0.3, "Share of it generated at temperature 0, the rest at 1.")
    generated: Path | None = option(None, "Generated text of an earlier run (run/generated.pt) to use instead.")

    def __post_init__(self) -> None:
        if self.generated_tokens < 0:
            raise ConfigError(f"generated_tokens must not be negative, not {self.generated_tokens}")
        for name in ("generated_share", "greedy_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(OnPolicyConfig):
    """Options of `forerun train draft_model`; `held_out` applies if the target's record names no files."""

    loss: str = option("lk", "Loss: kl, lk or tv_ce.")
    shape: ModelShape = field(default_factory=lambda: ModelShape(128, 2, 2, 1, 384, 2048))
    tokens: int = 2_400_000
    matrix_lr: float = 0.01
    lr: float = 4e-3
    after: tuple[Path, ...] = option((), "Folder of a draft model to complement: train where it misses.")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "after", tuple(Path(folder) for folder in self.after))
        if self.loss not in LOSS_NAMES:
            raise ConfigError(f"loss must be one of {', '.join(LOSS_NAMES)}, not {self.loss!r}")


@dataclass(frozen=True, kw_only=True)
class HeadTrainConfig(OnPolicyConfig):
    """Options of `forerun train METHOD`."""

    method: str = "medusa"  # which head
    depth: int | None = option(None, "Number of tokens ahead to predict. Default: 5, for layerskip 1.")
    exit_layer: int | None = option(None, "Layerskip: number of target layers before the exit. Default: half.")
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the head."})
    tokens: int = 300_000
    length: int = 256
    long_share: float = 0.0
    lr: float = 1e-3
    matrix_lr: float = 5e-3
    generated_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in HEAD_NAMES:
            raise ConfigError(f"no head is called {self.method!r}: choose one of {', '.join(sorted(HEAD_NAMES))}")
        early = self.method == "layerskip"
        if self.depth is None:
            object.__setattr__(self, "depth", 1 if early else 5)
        elif self.depth < 1:
            raise ConfigError(f"depth must be at least 1, not {self.depth}")
        elif early and self.depth > 1:
            raise ConfigError(f"layerskip's head guesses one token at a time: remove depth ({self.depth})")
        if self.exit_layer is not None and not early:
            raise ConfigError(
                f"only layerskip leaves the target early: remove exit_layer, or train that, not {self.method}"
            )
        if self.options:
            self._check_options()

    def _check_options(self) -> None:
        from forerun_lab.train.heads import HEADS

        known = HEADS[self.method].options_known
        for key in self.options:
            if key not in known:
                has = f"it has {', '.join(sorted(known))}" if known else "it has none"
                raise ConfigError(f"{self.method} has no option {key!r}; {has}")


@dataclass(frozen=True, kw_only=True)
class JointConfig(OnPolicyConfig):
    """Options of `forerun train medusa2`; ``out`` gets the folders ``target`` and ``head``."""

    depth: int = option(5, "Number of tokens ahead that the heads predict.")
    head: Path | None = option(None, "Folder of a trained medusa head of the target to start from. Skips the warm-up.")
    warmup_tokens: int | None = option(
        None, "Tokens that train the heads alone first. Default: 300,000, with --head none."
    )
    tokens: int = 600_000
    head_weight: float = option(0.2, "Weight of the heads' loss (lambda_0).")
    backbone_rate: float = option(0.25, "Learning rates of the copy, as a share of the heads'.")
    self_distillation: bool = option(False, "Train the copy towards the original's distribution instead of the text.")
    generated_tokens: int = 0
    length: int = 256
    long_share: float = 0.0
    lr: float = 1e-3
    matrix_lr: float = 5e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 1:
            raise ConfigError(f"depth must be at least 1, not {self.depth}")
        if self.warmup_tokens is None:
            object.__setattr__(self, "warmup_tokens", 0 if self.head else 300_000)
        elif self.head:
            raise ConfigError(f"the head in {self.head} has learnt alone already: remove warmup_tokens, or head")
        elif self.warmup_tokens < 1:
            raise ConfigError(f"warmup_tokens must be at least 1, not {self.warmup_tokens}")
        for name in ("head_weight", "backbone_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")


def _plain(value: Any) -> Any:
    """``value`` as JSON: paths become text."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
