"""``python -m forerun_lab.bench.beams``: beam search with speculation, compared with plain beam search, transformers'
and, for encoder-decoders, CTranslate2's.

Contenders alternate on every prompt; whole requests are timed, prefill included. A row's speed-up is the mean over
prompts of plain beam search's seconds over its own; ± is its standard error. Beams are the same if their tokens and, in
our engine, the bits of their scores are; "scores off by" is the largest difference for equal tokens. Encoder-decoders
end their answers themselves; others have the requested length. Losing rows are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from forerun.core.errors import ConfigError, ForerunError
from forerun.engine.llm import LLM
from forerun.measure.environment import environment
from forerun.measure.prompts import make_prompts
from forerun.models.files.open import resolve
from forerun.sampling.params import BeamSearchParams
from forerun_lab.peers.outside import Worker, started

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
TITLES = ["beams", "setting", "steps/round", "nodes/round", "steps/s", "speed-up", "±", "same beams", "scores off by"]
Search = Callable[[Sequence[int], BeamSearchParams], "BeamResult"]


@dataclass
class BeamResult:
    """One request's beams without their final tokens, their scores, seconds and steps."""

    beams: list[list[int]]
    scores: list[float]
    seconds: float
    steps: int
    rounds: int | None = None
    """None for another engine."""
    nodes: int = 0

    def same(self, other: BeamResult) -> bool:
        """Whether the tokens and, in our engine, the bits of the scores are equal."""
        ours = self.rounds is not None and other.rounds is not None
        return self.beams == other.beams and (not ours or self.scores == other.scores)

    def off(self, other: BeamResult) -> float:
        """The largest difference of the scores of equal beams."""
        return max(abs(one - two) for one, two in zip(self.scores, other.scores, strict=True))


@dataclass
class BeamRow:
    """One contender at one width, over all prompts."""

    beams: int
    setting: str
    results: list[BeamResult] = field(default_factory=list)

    def as_dict(self, plain: BeamRow) -> dict[str, Any]:
        ratios = [base.seconds / own.seconds for base, own in zip(plain.results, self.results)]
        rounds = [result.rounds for result in self.results if result.rounds is not None]
        whole = sum(rounds) if len(rounds) == len(self.results) else None
        return {
            "beams": self.beams,
            "setting": self.setting,
            "steps_per_round": sum(result.steps for result in self.results) / whole if whole else None,
            "nodes_per_round": sum(result.nodes for result in self.results) / whole if whole else None,
            "steps_per_second": sum(result.steps for result in self.results)
            / sum(result.seconds for result in self.results),
            "speedup": mean(ratios),
            "speedup_error": stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
            "same_beams": mean(base.same(own) for base, own in zip(plain.results, self.results)),
            "scores_off_by": max(
                (
                    own.off(base)
                    for base, own in zip(plain.results, self.results)
                    if own.scores and own.beams == base.beams
                ),
                default=None,
            ),
        }


def forerun_search(llm: LLM, speculate: bool) -> Search:
    """Our engine, one request at a time."""

    def search(prompt: Sequence[int], params: BeamSearchParams) -> BeamResult:
        began = perf_counter()
        output = llm.beam_search({"prompt_token_ids": prompt}, params, False, speculate=speculate)[0]
        seconds, metrics = perf_counter() - began, output.metrics
        beams = [sequence.tokens for sequence in output.sequences]
        scores = [sequence.score for sequence in output.sequences]
        return BeamResult(beams, scores, seconds, metrics.decode_tokens, metrics.rounds, metrics.num_draft_tokens)

    return search


def transformers_search(llm: LLM) -> Search:
    """transformers, on the same weights; it sums scores in another order."""
    info = llm.model.info
    kind: Any = AutoModelForCausalLM if info.encoder is None else AutoModelForSeq2SeqLM
    model = kind.from_pretrained(
        resolve(llm.config.model), dtype=info.dtype, use_safetensors=True, trust_remote_code=False
    ).eval()
    ends = set() if info.encoder is None else info.eos_ids
    filler = 0 if info.encoder is None else info.encoder.start[0]

    @torch.inference_mode()
    def search(prompt: Sequence[int], params: BeamSearchParams) -> BeamResult:
        ids = torch.tensor([list(prompt)])
        more: dict[str, Any] = {} if ends else {"eos_token_id": None}
        began = perf_counter()
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=params.beam_width, num_return_sequences=params.n,
            max_new_tokens=params.max_tokens, do_sample=False, early_stopping=False, pad_token_id=filler,
            output_scores=True, return_dict_in_generate=True, **more,
        )  # fmt: skip
        seconds = perf_counter() - began
        begin = len(info.begin(prompt)[0])
        beams = [[*row[:begin], *_ended(row[begin:], ends)] for row in result.sequences.tolist()]
        scores = [] if params.beam_width == 1 else result.sequences_scores.tolist()
        return BeamResult(beams, scores, seconds, _steps(beams, begin, params))

    return search


def ctranslate2_search(llm: LLM, python: str) -> tuple[Worker, Search]:
    """CTranslate2, in a process of its own under the interpreter ``python``; the checkpoint must be a folder. Raises
    ConfigError."""
    info = llm.model.info
    if info.encoder is None:
        raise ConfigError("the ctranslate2 peer supports encoder-decoders only: remove it")
    threads = torch.get_num_threads()
    worker = started("ctranslate2", python, threads, tempfile.TemporaryDirectory(prefix="forerun-peer-"))
    try:
        worker.ask({"model": str(resolve(llm.config.model)), "threads": threads})
    except ConfigError:
        worker.end()
        raise

    def search(prompt: Sequence[int], params: BeamSearchParams) -> BeamResult:
        question = {"source": list(prompt), "width": params.beam_width, "max_tokens": params.max_tokens}
        answer = worker.ask({**question, "length_penalty": params.length_penalty})
        begin = info.begin(prompt)[0]
        beams = [[*begin, *_ended(beam, info.eos_ids)] for beam in answer["beams"]]
        return BeamResult(beams, answer["scores"], answer["seconds"], _steps(beams, len(begin), params))

    return worker, search


def _ended(tokens: Sequence[int], ends: Iterable[int]) -> list[int]:
    """Tokens before the one that ended the beam."""
    return list(takewhile(lambda token: token not in ends, tokens))


def _steps(beams: Sequence[Sequence[int]], begin: int, params: BeamSearchParams) -> int:
    """Least number of steps, after the first, that beams of this length take."""
    return min(max(len(beam) - begin for beam in beams) + 1, params.max_tokens) - 1


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and the environment. Raises ForerunError."""
    widths = [int(width) for width in args.widths.split(",")]
    engine = {"dtype": args.dtype, "page_size": 16, "max_num_seqs": max(8, *widths)}
    base = LLM(args.model, threads=torch.get_num_threads(), speculative_config=None, **engine)
    contenders = {"plain": forerun_search(base, speculate=False)}
    for setting in json.loads(args.settings) if args.settings else SETTINGS:
        draft = {"model": args.draft} if args.draft is not None and setting["method"] == "draft_model" else {}
        contenders[_name(setting)] = forerun_search(
            LLM(args.model, threads=torch.get_num_threads(), speculative_config={**setting, **draft}, **engine),
            speculate=True,
        )
    contenders["transformers"] = transformers_search(base)
    worker = None
    if args.ctranslate2:
        worker, contenders["ctranslate2"] = ctranslate2_search(base, args.ctranslate2)
    prompts = make_prompts(
        args.prompt_set, base.tokenizer, count=args.prompts, length=args.prompt_tokens, file=args.prompts_file
    )
    rows = []
    for width in widths:
        params = BeamSearchParams(width, args.tokens, ignore_eos=base.model.info.encoder is None)
        group = {name: BeamRow(width, name) for name in contenders}
        for search in contenders.values():
            search(prompts[0], params)  # the first time compiles and allocates
        for prompt in prompts:
            for name, search in contenders.items():
                group[name].results.append(search(prompt, params))
        for row in group.values():
            rows.append(row.as_dict(group["plain"]))
            print(_line(rows[-1]), flush=True)
    if worker is not None:
        worker.end()
    return rows, environment(base, engine)


def _name(setting: dict[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in setting.items() if key not in ("method", "model"))
    return f"{setting['method']}, {rest}" if rest else setting["method"]


def _line(row: dict[str, Any]) -> str:
    cells = [str(row["beams"]), row["setting"]]
    for name, form in (
        ("steps_per_round", ".2f"), ("nodes_per_round", ".1f"), ("steps_per_second", ".0f"), ("speedup", ".2f"),
        ("speedup_error", ".2f"), ("same_beams", ".0%"), ("scores_off_by", ".0e"),
    ):  # fmt: skip
        value = row.get(name)
        cells.append("" if value is None else format(value, form))
    return "| " + " | ".join(cells) + " |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As markdown."""
    return "\n".join([f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *map(_line, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun_lab.bench.beams", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="forerun:target")
    parser.add_argument("--draft", help="the draft models' checkpoint")
    parser.add_argument("--settings", help="speculative_configs as a JSON list")
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--prompt-set", default="held_out")
    parser.add_argument("--prompts-file", type=Path, help="take prompts from this file, one per line")
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="an interpreter that has ctranslate2 and transformers")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print such a file as a table, and end")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))["rows"]))
        return
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    try:
        rows, about = measure(args)
    except ForerunError as error:
        sys.exit(f"error: {error}")
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name not in ("out", "table")}
        settings |= {"prompts_file": args.prompts_file and str(args.prompts_file)}
        args.out.write_text(json.dumps({"environment": about, "settings": settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
