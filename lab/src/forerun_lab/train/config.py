"""Configurations of the training commands, and the shape of a model that is trained from scratch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ConfigError
from forerun.measure.prompts import standard_library
from forerun.tune.config import LoopSettings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HEAD_NAMES = ("medusa", "blockwise", "dflash", "eagle", "parallel", "lookahead", "layerskip")
LOSS_NAMES = ("kl", "lk", "tv_ce")


@dataclass(frozen=True)
class ModelShape:
    """Size of a Llama model with tied embeddings."""

    hidden_size: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate_size: int = 1024
    positions: int = 2048  # longest context

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

    out: Path  # folder of the finished model; its `run` folder holds what a run needs to go on
    corpus: Path = field(default_factory=standard_library)  # folder of text files, or one file
    held_out: int | None = None  # files that are not trained on; none means 25, or a tenth of fewer than 250
    shape: ModelShape = field(default_factory=ModelShape)
    tokens: int = 9_000_000  # length of the run; on resume a smaller number starts the decay earlier
    batch_tokens: int = 4096  # tokens of one optimizer step
    length: int = 512  # tokens of a training sequence
    long_share: float = 0.1  # share of the run in sequences as long as the context
    decay_share: float = 0.65  # share of the run over which the learning rates fall to zero
    matrix_lr: float = 0.006  # peak learning rate of hidden matrices (Muon)
    lr: float = 2e-3  # peak learning rate of everything else (AdamW)
    seed: int = 0
    threads: int = 2  # CPU threads; 0 leaves torch's choice
    resume: bool = True  # go on from a checkpoint in `out`
    pause_file: Path | None = None  # while this file exists the run sleeps
    eval_tokens: int = 200_000  # tokens between two looks at held-out text
    progress: bool = True  # show progress bars

    def settings(self) -> LoopSettings:
        """The settings of the training loop."""
        return LoopSettings(
            out=self.out / "run",
            tokens=self.tokens,
            batch_tokens=self.batch_tokens,
            micro_tokens=min(self.batch_tokens, 4096),
            length=min(self.length, self.shape.positions),
            long_length=self.shape.positions,
            long_share=self.long_share,
            decay_share=self.decay_share,
            matrix_lr=self.matrix_lr,
            lr=self.lr,
            seed=self.seed,
            threads=self.threads,
            resume=self.resume,
            pause_file=self.pause_file,
            eval_tokens=self.eval_tokens,
            progress=self.progress,
        )

    def recipe(self) -> dict[str, Any]:
        """The options that the result depends on, for the record beside the weights."""
        local = ("out", "corpus", "target", "resume", "pause_file", "progress")
        return {key: _plain(value) for key, value in asdict(self).items() if key not in local}


@dataclass(frozen=True, kw_only=True)
class TargetConfig(RunConfig):
    """Options of `forerun train target`."""

    vocab_size: int = 4096  # tokens of the tokenizer

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise ConfigError(f"vocab_size must be at least 257, all bytes and an end-of-text token: {self.vocab_size}")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(RunConfig):
    """Options of trainings that learn from a target's own text too."""

    target: Path | None = None  # folder of the target; none means the bundled one
    generated_tokens: int = 400_000  # text that the target writes before training; 0 for none
    generated_share: float = 0.5  # share of the training sequences that come from it
    greedy_share: float = 0.3  # share of it written at temperature 0, the rest at 1
    generated: Path | None = None  # text of an earlier run (its run/generated.pt) instead of new text

    def __post_init__(self) -> None:
        if self.generated_tokens < 0:
            raise ConfigError(f"generated_tokens must not be negative, not {self.generated_tokens}")
        for name in ("generated_share", "greedy_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(OnPolicyConfig):
    """Options of `forerun train draft_model`; `held_out` applies if the target's record names no files."""

    loss: str = "lk"  # kl, lk or tv_ce
    shape: ModelShape = field(default_factory=lambda: ModelShape(128, 2, 2, 1, 384, 2048))
    tokens: int = 2_400_000
    matrix_lr: float = 0.01
    lr: float = 4e-3
    after: tuple[Path, ...] = ()  # folder of a draft that this one complements, learning where it misses

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "after", tuple(Path(folder) for folder in self.after))
        if self.loss not in LOSS_NAMES:
            raise ConfigError(f"loss must be one of {', '.join(LOSS_NAMES)}, not {self.loss!r}")


@dataclass(frozen=True, kw_only=True)
class HeadTrainConfig(OnPolicyConfig):
    """Options of `forerun train METHOD`."""

    method: str = "medusa"  # which head
    depth: int | None = None  # tokens ahead that the head learns to guess; none means 5, and 1 for layerskip
    exit_layer: int | None = None  # layerskip: after how many layers the target leaves; none means half
    options: dict[str, Any] = field(default_factory=dict)  # the head's own sizes
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

    depth: int = 5  # tokens ahead that the heads learn to guess
    head: Path | None = None  # folder of a medusa head of the target that has learnt alone already: no warm-up
    warmup_tokens: int | None = None  # tokens that the heads alone learn from first; none means 300,000, or 0 with head
    tokens: int = 600_000
    head_weight: float = 0.2  # lambda_0: weight of the heads' loss beside the copy's own
    backbone_rate: float = 0.25  # the copy's learning rates, as a share of the heads'
    self_distillation: bool = False  # keep the copy close to the original instead of to the text
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
