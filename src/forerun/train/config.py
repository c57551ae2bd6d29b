"""What every training command is told, and the size of a model that is trained from scratch."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.core.errors import ConfigError
from forerun.train.corpus import standard_library
from forerun.train.loop import LoopSettings


@dataclass(frozen=True)
class Shape:
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
    held_out: int = 25  # files that are not trained on
    shape: Shape = field(default_factory=Shape)
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
        """The part that the training loop needs."""
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


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: paths become text."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
