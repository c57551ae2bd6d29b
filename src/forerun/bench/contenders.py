"""Who is measured: the engine with each method, and peers. All take the same prompts and options."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Protocol

from forerun.core.errors import ConfigError
from forerun.engine.config import NONE, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.plan.estimate import Measured, measure
from forerun.sampling.params import SamplingParams
from forerun.speculate.accept import rules
from forerun.speculate.accept.synthetic import KEYS as SYNTHETIC
from forerun.speculate.draft import drafters

FASTEST = "none_fastest"


class Contender(Protocol):
    """One row of the table at one concurrency."""

    name: str

    def facts(self) -> dict[str, Any]:
        """What the row says of it besides measurements."""

    def promises_identity(self, temperature: float) -> bool:
        """Whether its tokens must be those of plain decoding."""

    def run(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> Measured:
        """Answer the prompts, all of them; only decoding is timed."""

    def close(self) -> None:
        """Give memory back."""


@dataclass
class EngineContender:
    """Forerun's engine on a loaded target with one speculative configuration."""

    name: str
    llm: LLM
    options: Mapping[str, Any]
    concurrency: int
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        config = replace(self.llm.config, max_num_seqs=self.concurrency)
        self.engine = Engine(self.llm.model, self.llm.tokenizer, config, SpeculativeConfig.parse(self.options))

    def facts(self) -> dict[str, Any]:
        speculative = self.engine.speculative
        drafter = speculative.drafter
        return {
            "accept": speculative.accept if drafter is not None else None,
            "length": speculative.length if drafter is not None else None,
            "num_speculative_tokens": drafter.num_speculative_tokens if drafter is not None else None,
            "synthetic": speculative.synthetic is not None,
            "invariant": self.llm.model.row_multiple > 1,
            "model_path": self.llm.model.info.path,
        }

    def promises_identity(self, temperature: float) -> bool:
        rule = self.engine.rule
        return self.llm.model.row_multiple > 1 and (rule.identity or (rule.lossless and temperature == 0.0))

    def run(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> Measured:
        return measure(self.engine, prompts, params)

    def close(self) -> None:
        del self.engine


def method_configs(
    methods: Seq[str], accepts: Seq[str], lengths: Seq[str], counts: Seq[int | None], shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every combination as a ``speculative_config``, ``none`` first.

    A key of ``shared`` goes to the methods that know it. Raises ConfigError where none of them does, and for
    unknown names.
    """
    configs: list[dict[str, Any]] = [{"method": NONE}]
    used: set[str] = set()
    for method, accept, length, count in product(dict.fromkeys(methods), accepts, lengths, counts or [None]):
        if method == NONE:
            continue
        own = {item.name for item in fields(drafters[method].config_class)} | {*rules[accept].options(), *SYNTHETIC}
        config = {key: value for key, value in shared.items() if key in own}
        used |= set(config)
        config |= {"method": method, "accept": accept, "length": length}
        if count is not None:
            config["num_speculative_tokens"] = count
        SpeculativeConfig.parse(config)
        configs.append(config)
    for key in shared:
        if key not in used:
            raise ConfigError(f"none of the methods {', '.join(methods)} has an option {key!r}")
    return configs
