"""``forerun tune TARGET --draft DRAFT``: the fastest settings of a draft model for a target, on this machine.

Nothing is inferred: candidates answer the same held-out prompts in turns with plain decoding. First every weight format
of the draft; then, with the fastest one, other confidence thresholds and draft vocabularies, a tree, and look-ups.
How far is drafted in each round is left to the length policy ``adaptive``, which measures what rows and steps cost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from forerun.core.errors import ConfigError
from forerun.engine import tuned
from forerun.engine.llm import LLM
from forerun.measure.rounds import EngineContender
from forerun.measure.search import Race
from forerun.models.files.checkpoint import read_object
from forerun.models.files.inventory import here
from forerun.models.files.open import Checkpoint
from forerun.models.formats import blocks
from forerun.models.load import sharing
from forerun.speculate.draft.model import LARGE, DraftModel
from forerun.tune.config import PairConfig
from forerun.tune.data import held_out_prompts
from forerun.tune.page import pair_page

DRAFT = "draft_model"
DRAFT_VOCABULARIES = (32_768, 65_536)
"""Sizes of the draft vocabulary that are tried where the draft has at least twice as many outputs."""
FORMATS_END, TURNS_END = 0.45, 0.95
"""Fraction of the time budget at which each stage ends."""
MAX_PROMPT = 704
"""Tokens of a prompt, at most."""
LONG = {"num_speculative_tokens": 12, "confidence_threshold": 0.6}
"""Chains that end at low confidence, as a draft model makes them by default."""
THRESHOLDS = (0.3, 0.8)
"""Other confidence thresholds that are tried."""
SHORT = {"num_speculative_tokens": 4}
"""A chain that ends at no confidence."""
BLOCK_FORMATS = ("q4_0", "q8_0", "q4_k")
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
TREE = {"num_speculative_tokens": 4, "tree_nodes": 8}
REPORT = "report.html"


def make_out(out: Path) -> None:
    """Makes the folder of a result. Raises ConfigError where that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error


def tune_pair(config: PairConfig, out: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Search, and write the result into the folder ``out``. Raises ForerunError subclasses."""
    if _holds_another_tuning(out, config.draft):
        raise ConfigError(f"{out} has another tuning: choose another --out or remove it")
    made = not out.exists()
    make_out(out)  # now: minutes of search may not end in this error
    try:
        result = search(config, say)
    except BaseException:
        if made:
            out.rmdir()
        raise
    (out / REPORT).write_text(pair_page(config.model, result), encoding="utf-8")
    more = {key: result[key] for key in ("measured", "forms", "verify_cost", "check")}
    tuned.save(out, config.model, result["chosen"], [], draft=config.draft, **more)
    say(verdict(result))
    say(f"{out}: use it with --tuned {out}, or LLM({config.model!r}, tuned={str(out)!r})")
    return out


def _holds_another_tuning(out: Path, draft: str) -> bool:
    """Whether the folder has a tuning that was made without ``draft``."""
    if not (out / tuned.FILE).is_file():
        return (out / "run").exists()
    saved = read_object(out / tuned.FILE).get("draft")
    return not isinstance(saved, dict) or saved.get("model") != draft


def verdict(result: Mapping[str, Any]) -> str:
    """One line with the chosen config and its speed-ups."""
    chosen, answers = without_model(result["chosen"]), result["check"]["answers"]
    speedups = ", ".join(
        f"{row['speedup']:.2f} at temperature {row['temperature']:g}, {row['concurrency']} at a time"
        for row in result["measured"]
        if row["config"] == chosen
    )
    return f"{json.dumps(chosen)}: over plain decoding {speedups}; {answers} answers are the same"


def without_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``speculative_config`` without the draft model's path."""
    parts = [without_model(part) for part in config.get("drafters", ())]
    return {key: value for key, value in config.items() if key != "model"} | ({"drafters": parts} if parts else {})


def search(config: PairConfig, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Find the fastest settings. Returns ``{"chosen": speculative_config, "measured": [{"config", "temperature",
    "concurrency", "speedup", ...}, ...], "forms": [...], "verify_cost": {sequences: {rows: cost}}, "check": {"passed",
    "answers", "different"}}``. Raises ConfigError if an answer differs with and without drafts."""
    if config.threads:
        torch.set_num_threads(config.threads)
    here(config.draft)
    Checkpoint.open(config.model).require_decoder("forerun tune")
    hidden = None if config.progress else True  # None: without a terminal
    with sharing() as loaded, tqdm(total=round(60 * config.minutes), desc="tuning, seconds", disable=hidden) as bar:
        return _Search(config, say, bar, loaded).run()


class _Search:
    def __init__(self, config: PairConfig, say: Callable[[str], None], bar: tqdm, loaded: dict[Any, Any]) -> None:
        """``loaded``: draft models that engines share (``models.load.sharing``)."""
        self.config, self.say, self.bar, self.loaded = config, say, bar, loaded
        self.began, self.seconds = time.monotonic(), dict[str, float]()
        context = Checkpoint.open(config.model).config.get_text_config().max_position_embeddings
        max_len = min(MAX_PROMPT + config.answer, context)
        self.llm = LLM(
            config.model,
            quantization=config.quantization,
            threads=torch.get_num_threads(),
            max_model_len=max_len,
            max_num_seqs=max(config.concurrency),
        )
        prompts = held_out_prompts(self.llm, max_len - config.answer)
        if len(prompts) < 8:
            raise ConfigError(f"an answer of {config.answer} tokens leaves no room for a prompt: lower it")
        order = sorted(range(len(prompts)), key=lambda i: (i % 4, i))  # one of each category first
        self.prompts = [prompts[i] for i in order]
        self.draft: dict[str, Any] = {"method": DRAFT, "model": config.draft}

    def run(self) -> dict[str, Any]:
        forms = [{**self.draft, "quantization": name, **LONG} for name in self._formats()]
        formats = self._race(forms, "forms", FORMATS_END)
        best = max(range(1, len(forms) + 1), key=formats.speedup)
        variants = [self._form(formats, index) for index in range(1, len(forms) + 1)]
        verify_cost, vocabularies = self._verify_cost(formats.contenders[best]), self._vocabularies(formats, best)
        first_rows = [{**row, "config": without_model(row["config"])} for row in formats.rows()]
        self._forget(formats, forms[best - 1]["quantization"])
        del formats
        race = self._race(self._others(forms[best - 1], vocabularies), "turns", TURNS_END)
        rows = [{**row, "config": without_model(row["config"])} for row in race.rows()]
        again = [row["config"] for row in rows]
        chosen, check = race.configs[race.best()], race.identity(race.best())
        self.llm.close()
        if not check["passed"]:
            raise ConfigError(f"speculation changed {check['different']} answers; nothing is recommended")
        return {
            "chosen": chosen, "measured": [*rows, *(row for row in first_rows if row["config"] not in again)],
            "forms": variants, "verify_cost": verify_cost, "check": check, "seconds": self.seconds,
        }  # fmt: skip

    def _race(self, candidates: Sequence[Mapping[str, Any]], stage: str, end: float) -> Race:
        """Measures candidates until this much of the time is over."""
        config = self.config
        race = Race(
            self.llm, [{**each, "length": "adaptive"} for each in candidates], self.prompts, config.workloads,
            tokens=config.answer, seed=config.seed,
        )  # fmt: skip
        race.run(lambda: self._over(end), self._tell)
        self.seconds[stage] = time.monotonic() - self.began - sum(self.seconds.values())
        return race

    def _over(self, end: float) -> bool:
        return time.monotonic() - self.began >= end * 60 * self.config.minutes

    def _tell(self, turn: int, race: Race) -> None:
        self.bar.update(round(min(time.monotonic() - self.began, self.bar.total)) - self.bar.n)
        fastest = race.best()
        config = json.dumps(without_model(race.configs[fastest]))
        self.say(f"measured on {turn} prompts each: {race.speedup(fastest):.2f} with {config}")

    def _formats(self) -> list[str]:
        """Weight formats of the draft that are tried, the default first."""
        info = self.llm.model.info
        if not blocks.can(info.dtype, info.device):
            return ["none"]
        small = Checkpoint.open(self.config.draft).weight_sizes()[0] <= LARGE
        return ["int8_rows", "none", *BLOCK_FORMATS[:2]] if small else [BLOCK_FORMATS[0], "none", *BLOCK_FORMATS[1:]]

    def _vocabularies(self, formats: Race, best: int) -> list[int]:
        """Other sizes of the draft vocabulary that are tried, for a large draft."""
        drafter = _drafter(formats.contenders[best])
        outputs = Checkpoint.open(self.config.draft).config.get_text_config().vocab_size
        outputs = min(outputs, drafter.context.sampler.vocab_size)
        large = drafter.model.info.weight_bytes > LARGE
        sizes = [size for size in DRAFT_VOCABULARIES if large and 2 * size <= outputs]
        return sizes if drafter.output_ids is None else [*sizes, outputs]

    def _others(self, best: Mapping[str, Any], vocabularies: Sequence[int]) -> list[dict[str, Any]]:
        """What is measured with the fastest format: it, other settings of it, a tree, and look-ups before it."""
        return [
            dict(best),
            *({**best, "confidence_threshold": threshold} for threshold in THRESHOLDS),
            *({**best, "draft_vocab_size": size} for size in vocabularies),
            *({**self.draft, "quantization": best["quantization"], **form} for form in (SHORT, TREE)),
            {"method": "cascade", "drafters": [SUFFIX, dict(best)]},
            dict(SUFFIX),
        ]

    def _forget(self, formats: Race, quantization: str) -> None:
        """Frees the draft models of other formats."""
        for contender in formats.contenders:
            contender.close()
        for key in [key for key in self.loaded if repr(quantization) not in repr(key)]:
            del self.loaded[key]

    def _form(self, formats: Race, index: int) -> dict[str, Any]:
        """A format's entry in ``forms`` of the result; costs in plain rounds."""
        contender = formats.contenders[index]
        prices, table = _prices(contender, 1)
        if DRAFT not in table.draft:
            raise ConfigError(f"{self.config.draft} drafts nothing for these prompts: it has too short a context")
        plain, steps = prices.verify(table, 1, 1), table.draft[DRAFT]
        total = [run for each in formats.runs for one in each.runs[index] for run in one.metrics]
        tested, matched = sum(run.tested for run in total), sum(run.matched for run in total)
        step = max(0.0, (steps(4) - steps(1)) / 3)
        return {
            "config": {"quantization": formats.configs[index]["quantization"]},
            "bytes": sum(model.info.weight_bytes for model in _drafter(contender).models()),
            "guessed": matched / max(1, tested),
            "start": max(0.0, steps(1) - step) / plain,
            "step": step / plain,
            "speedup": formats.speedup(index),
        }

    def _verify_cost(self, contender: EngineContender) -> dict[int, dict[int, float]]:
        """By the number of requests, the price of a verification by its rows, in plain rounds."""
        verify = {count: _prices(contender, count)[1].verify for count in self.config.concurrency}
        return {
            count: {rows: cost / curve(count) for rows, cost in curve.points.items() if rows >= count}
            for count, curve in verify.items()
        }


def _drafter(contender: EngineContender) -> DraftModel:
    drafter = contender.engine.router.drafters[DRAFT]
    assert isinstance(drafter, DraftModel)
    return drafter


def _prices(contender: EngineContender, count: int) -> tuple[Any, Any]:
    """The prices that the length policy measured, and its table for this many requests."""
    policy: Any = contender.engine.policy
    with torch.inference_mode():
        return policy.prices, policy.prices.at(count)
