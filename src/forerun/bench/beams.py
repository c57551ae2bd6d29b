"""``python -m forerun.bench.beams``: beam search with speculation, against plain beams and transformers' own.

Contenders take turns on every prompt, whole requests, prompts included. A row's speed-up is the mean over prompts of
plain beams' seconds over its own; ± is its standard error. Every losing row stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from forerun.bench.environment import environment
from forerun.bench.prompts import make_prompts
from forerun.core.errors import ForerunError
from forerun.engine.llm import LLM
from forerun.models.load import resolve
from forerun.sampling.beams import BeamSearchParams

SETTINGS: list[dict[str, Any]] = [
    {"method": "draft_model", "num_speculative_tokens": 1},
    {"method": "draft_model", "num_speculative_tokens": 2},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "draft_model", "tree": [2, 1, 1]},
    {"method": "draft_model", "tree": [4, 1, 1, 1]},
    {"method": "draft_model", "tree_nodes": 8},
    {"method": "eagle", "num_speculative_tokens": 2},
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "token_recycling", "tree": [3, 2]},
]
TITLES = ["beams", "setting", "steps/round", "nodes/round", "steps/s", "speed-up", "±", "same beams"]
Search = Callable[[Seq[int], BeamSearchParams], "Found"]


@dataclass
class Found:
    """One request's beams, each with its log-probability, and what they took."""

    beams: list[tuple[list[int], float]]
    seconds: float
    steps: int
    rounds: int | None = None
    nodes: int = 0


@dataclass
class Row:
    """One contender at one width, over all prompts."""

    beams: int
    setting: str
    found: list[Found] = field(default_factory=list)

    def as_dict(self, plain: Row) -> dict[str, Any]:
        ratios = [base.seconds / own.seconds for base, own in zip(plain.found, self.found)]
        rounds = [found.rounds for found in self.found if found.rounds is not None]
        whole = sum(rounds) if len(rounds) == len(self.found) else None
        return {
            "beams": self.beams,
            "setting": self.setting,
            "steps_per_round": sum(found.steps for found in self.found) / whole if whole else None,
            "nodes_per_round": sum(found.nodes for found in self.found) / whole if whole else None,
            "steps_per_second": sum(found.steps for found in self.found) / sum(found.seconds for found in self.found),
            "speedup": mean(ratios),
            "speedup_error": stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
            "same_beams": mean(base.beams == own.beams for base, own in zip(plain.found, self.found))
            if whole
            else mean(
                [tokens for tokens, _ in base.beams] == [tokens for tokens, _ in own.beams]
                for base, own in zip(plain.found, self.found)
            ),
        }


def ours(llm: LLM, speculate: bool) -> Search:
    """One request at a time through the engine."""

    def search(prompt: Seq[int], params: BeamSearchParams) -> Found:
        began = perf_counter()
        output = llm.beam_search({"prompt_token_ids": prompt}, params, False, speculate=speculate)[0]
        seconds, metrics = perf_counter() - began, output.metrics
        beams = [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]
        return Found(beams, seconds, metrics.decode_tokens, metrics.rounds, metrics.num_draft_tokens)

    return search


def theirs(llm: LLM) -> Search:
    """transformers' own, on the same weights; its scores add up in another order."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve(llm.config.model), dtype=llm.model.info.dtype, use_safetensors=True, trust_remote_code=False
    ).eval()

    @torch.inference_mode()
    def search(prompt: Seq[int], params: BeamSearchParams) -> Found:
        ids = torch.tensor([list(prompt)])
        began = perf_counter()
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=params.beam_width, num_return_sequences=params.n,
            max_new_tokens=params.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        seconds = perf_counter() - began
        return Found([(row, 0.0) for row in found.tolist()], seconds, params.max_tokens - 1)

    return search


def measure(wanted: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and the environment. Raises ForerunError."""
    widths = [int(width) for width in wanted.widths.split(",")]
    engine = {"dtype": wanted.dtype, "page_size": 16, "max_num_seqs": max(8, *widths)}
    base = LLM(wanted.model, **engine)
    contenders = {"plain": ours(base, speculate=False)}
    for setting in json.loads(wanted.settings) if wanted.settings else SETTINGS:
        given = (
            setting
            if wanted.draft is None or setting["method"] != "draft_model"
            else {**setting, "model": wanted.draft}
        )
        contenders[_name(setting)] = ours(LLM(wanted.model, speculative_config=given, **engine), speculate=True)
    contenders["transformers"] = theirs(base)
    prompts = make_prompts(wanted.prompt_set, base.tokenizer, count=wanted.prompts, length=wanted.prompt_tokens)
    rows = []
    for width in widths:
        params = BeamSearchParams(width, wanted.tokens, ignore_eos=True)
        group = {name: Row(width, name) for name in contenders}
        for search in contenders.values():
            search(prompts[0], params)  # the first time compiles and allocates
        for prompt in prompts:
            for name, search in contenders.items():
                group[name].found.append(search(prompt, params))
        for row in group.values():
            rows.append(row.as_dict(group["plain"]))
            print(_line(rows[-1]), flush=True)
    return rows, environment(base, engine)


def _name(setting: dict[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in setting.items() if key not in ("method", "model"))
    return f"{setting['method']}, {rest}" if rest else setting["method"]


def _line(row: dict[str, Any]) -> str:
    cells = [str(row["beams"]), row["setting"]]
    for name, form in (
        ("steps_per_round", ".2f"), ("nodes_per_round", ".1f"), ("steps_per_second", ".0f"), ("speedup", ".2f"),
        ("speedup_error", ".2f"), ("same_beams", ".0%"),
    ):  # fmt: skip
        cells.append("" if row[name] is None else format(row[name], form))
    return "| " + " | ".join(cells) + " |"


def table(rows: Seq[dict[str, Any]]) -> str:
    """As markdown."""
    return "\n".join([f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *map(_line, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.beams", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="forerun:target")
    parser.add_argument("--draft", help="the draft models' checkpoint")
    parser.add_argument("--settings", help="speculative_configs as a JSON list")
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--prompt-set", default="held_out")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print such a file as a table, and end")
    wanted = parser.parse_args()
    if wanted.table:
        print(table(json.loads(wanted.table.read_text(encoding="utf-8"))["rows"]))
        return
    torch.set_num_threads(wanted.threads)
    warnings.simplefilter("ignore")
    try:
        rows, about = measure(wanted)
    except ForerunError as error:
        sys.exit(f"error: {error}")
    if wanted.out:
        settings = {name: value for name, value in vars(wanted).items() if name not in ("out", "table")}
        wanted.out.write_text(json.dumps({"environment": about, "settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
