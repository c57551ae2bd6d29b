"""Who is measured: the engine with each method, and peers. All take the same prompts and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forerun.engine.config import SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.plan.estimate import Measured, measure, rounds
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import DrafterConfig

FASTEST = "none_fastest"


class Contender(Protocol):
    """One row of the table at one concurrency."""

    name: str

    def facts(self) -> dict[str, Any]:
        """What the row says of it besides measurements."""

    def promises_identity(self, temperature: float) -> bool:
        """Whether its tokens must be those of plain decoding."""

    def run(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> Measured:
        """Answer the prompts, all of them, and time decoding."""

    def close(self) -> None:
        """Give memory back."""


@dataclass
class EngineContender:
    """Forerun's engine on a loaded target with one speculative configuration."""

    name: str
    llm: LLM
    options: Mapping[str, Any]
    concurrency: int
    whole: bool = False
    """Whether the rounds that read prompts count."""
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self._new_engine()

    def _new_engine(self) -> Engine:
        config = replace(self.llm.config, max_num_seqs=self.concurrency)
        return Engine(self.llm.model, self.llm.tokenizer, config, SpeculativeConfig.parse(self.options))

    def renew(self, fresh: bool = False) -> None:
        """A drafter that has not seen these prompts' answers, which some would recite; what the length policy has
        measured stays, unless ``fresh``."""
        policy = self.engine.policy
        del self.engine
        self.engine = self._new_engine()
        if fresh:
            return
        policy.setting = self.engine.policy.setting
        self.engine.policy = policy
        self.engine.scheduler.draft_rows = policy.longest_nodes

    def facts(self) -> dict[str, Any]:
        speculative = self.engine.speculative
        drafter = speculative.drafter
        return {
            "accept": speculative.accept if drafter is not None else None,
            "length": speculative.length if drafter is not None else None,
            "num_speculative_tokens": drafter.num_speculative_tokens if drafter is not None else None,
            "tree": _tree(drafter),
            "synthetic": speculative.synthetic is not None,
            "invariant": self.llm.model.invariant,
            "model_path": self.llm.model.info.path,
        }

    def promises_identity(self, temperature: float) -> bool:
        rule = self.engine.rule
        return self.llm.model.invariant and (rule.identity or (rule.lossless and temperature == 0.0))

    def run(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> Measured:
        return measure(self.engine, prompts, params, whole=self.whole)

    def rounds(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], found: Measured) -> Iterator[None]:
        """The same, round by round."""
        return rounds(self.engine, prompts, params, found, whole=self.whole)

    def close(self) -> None:
        del self.engine


def peer_facts(about: str) -> dict[str, Any]:
    """What a row says of another implementation: nothing of ours."""
    ours = dict.fromkeys(("accept", "length", "num_speculative_tokens"))
    return {**ours, "synthetic": False, "invariant": False, "model_path": about}


def _tree(drafter: DrafterConfig | None) -> str | None:
    """How drafts branch: a shape, a number of nodes, ``yes`` where parts of the drafter say how; None: not at all."""
    if drafter is None or not drafter.branches:
        return None
    if drafter.tree is not None:
        return "x".join(map(str, drafter.tree))
    nodes = getattr(drafter, "tree_nodes", None)
    return f"best {nodes}" if nodes is not None else "yes"
