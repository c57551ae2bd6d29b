"""Reference 002's Tables 3 and 5 and appendix A.2 in kind, on the bundled pair."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from forerun.engine.llm import LLM
from forerun.measure.prompts import held_out_files, standard_library
from forerun.models.files.open import Checkpoint
from forerun.models.run.hf import read_module
from forerun.sampling.params import SamplingParams
from forerun_lab.reproduce.distributions import LENIENCE, NgramCounts, Rates, Sums
from forerun_lab.reproduce.parts import Cell, ReportTable, Section, Settings
from forerun_lab.train.corpus import encode_files, list_files

TARGET, DRAFT = "forerun:target", "forerun:draft"
ANSWER, PROMPT = 128, 64
COUNTED = 1_000_000
"""Tokens that unigrams and bigrams are counted on."""
PAPER_3 = {("unigram", 0): 0.03, ("bigram", 0): 0.05, ("draft", 0): 0.88} | {
    ("unigram", 1): 0.03, ("bigram", 1): 0.05, ("draft", 1): 0.89
}  # fmt: skip
PAPER_5 = {"unigram": (0.07, 0.1, 0.11, 0.16), "bigram": (0.19, 0.23, 0.25, 0.32), "draft": (0.62, 0.71, 0.76, 0.84)}
PAPER_5_GREEDY = (0.75, 0.75, 0.8, 0.87)


@cache
def rates(tokens: int, temperature: float) -> dict[str, Rates]:
    """Rates by draft, over ``tokens`` tokens that the bundled target wrote at ``temperature`` after held-out text."""
    texts = list(_written(tokens, temperature))
    target, draft = (_module(name) for name in (TARGET, DRAFT))
    counts = _counts(len(_distributions(target, texts[0][0])[0]))
    sums = {name: Sums() for name in ("unigram", "bigram", "draft")}
    for text, start in texts:
        p = _distributions(target, text)[start - 1 : -1]
        before = text[start - 1 : -1]
        for name, q in (
            ("unigram", counts.q(before, 1)),
            ("bigram", counts.q(before, 2)),
            ("draft", _distributions(draft, text)[start - 1 : -1]),
        ):
            sums[name].add(p, q)
    return {name: result.means() for name, result in sums.items()}


def _written(tokens: int, temperature: float) -> Iterator[tuple[list[int], int]]:
    """The target's own texts, prompt and all, and where the answer begins."""
    llm = LLM(TARGET, speculative_config=None)
    ids = encode_files(list(held_out_files()), llm.tokenizer, 0).tolist()
    count = -(-tokens // ANSWER)
    step = (len(ids) - PROMPT) // count
    prompts = [ids[step * i : step * i + PROMPT] for i in range(count)]
    params = [SamplingParams(temperature=temperature, max_tokens=ANSWER, seed=i, ignore_eos=True) for i in range(count)]
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        yield [*prompt, *output.outputs[0].token_ids], PROMPT


def _module(name: str) -> torch.nn.Module:
    module = read_module(Checkpoint.open(name), torch.float32, attention=None)
    module.eval()
    return module


@torch.inference_mode()
def _distributions(module: torch.nn.Module, text: list[int]) -> Tensor:
    logits: Tensor = module(torch.tensor([text])).logits[0]
    return logits.double().softmax(-1)


def _counts(vocabulary: int) -> NgramCounts:
    tokenizer = LLM(TARGET, speculative_config=None).tokenizer
    unseen = set(held_out_files())
    files = [path for path in list_files(standard_library()) if path not in unseen]
    return NgramCounts([encode_files(files, tokenizer, 0)[:COUNTED].tolist()], vocabulary)


def table_3(settings: Settings) -> ReportTable:
    rows: list[list[Cell]] = []
    for temperature in (0, 1):
        result = rates(settings.tokens, float(temperature))
        for name, rate in result.items():
            alpha = rate.greedy if temperature == 0 else rate.sampled
            rows.append([name, temperature, PAPER_3[name, temperature], f"{alpha:.3f}"])
    return ReportTable(["draft", "T", "alpha, paper (97M, 6M; lm1b)", "ours (11M, 0.9M; Python)"], rows)


def table_5(settings: Settings) -> ReportTable:
    rows: list[list[Cell]] = []
    warm, cold = rates(settings.tokens, 1.0), rates(settings.tokens, 0.0)
    for name, rate in warm.items():
        rows.append([name, "1, standardised", *_beside(PAPER_5[name], rate.lenient)])
    rows.append(["draft", "0, before standardising", *_beside(PAPER_5_GREEDY, cold["draft"].lenient_greedy)])
    return ReportTable(["draft", "T, form", *(f"l = {keep:g}: paper, ours" for keep in LENIENCE)], rows)


def _beside(paper: tuple[float, ...], ours: tuple[float, ...]) -> list[Cell]:
    return [f"{printed:.2f}, {measured:.3f}" for printed, measured in zip(paper, ours, strict=True)]


def rejection(settings: Settings) -> ReportTable:
    result = rates(settings.tokens, 1.0)
    rows: list[list[Cell]] = [[name, f"{rate.sampled:.4f}", f"{rate.rejection:.6f}"] for name, rate in result.items()]
    return ReportTable(["draft", "speculative sampling accepts (alpha)", "rejection sampling accepts"], rows)


WHY = (
    "Other models, text and tokenizers: the bundled pair (11M and 0.9M parameters, 12:1 where the paper has 16:1) "
    "writes Python, whose next token a bigram guesses far better than that of news; drafts were distilled from the "
    "target, the paper's were not."
)
PARTS = [
    Section(
        "table-3-decoder",
        "Acceptance rates of a decoder pair",
        "Reference 002, Table 3, GPT-like rows",
        WHY,
        table_3,
        False,
    ),
    Section(
        "table-5-decoder",
        "Acceptance rates with lenience",
        "Reference 002, Table 5 and A.5",
        "The paper's are T5-XXL's on EnDe; ours a decoder pair's. What holds in both: each step of lenience buys a "
        "few points. At T = 0 the paper's condition is printed the wrong way round (p <= l max p accepts the least "
        "likely); taken as p >= l max p.",
        table_5,
        False,
    ),
    Section(
        "appendix-a2",
        "Speculative against rejection sampling",
        "Reference 002, A.2",
        "The paper prints the inequality and no numbers. One rare token that the draft misses makes the least ratio, "
        "and so all acceptance of rejection sampling, nearly nothing.",
        rejection,
        False,
    ),
]
