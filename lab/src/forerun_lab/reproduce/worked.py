"""The references' worked examples, decided by the rules and drafters that serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.batch import Scores
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Drafts
from forerun.sampling.draw import Sampler
from forerun.sampling.params import SamplingParams
from forerun.speculate.accept import rules
from forerun.speculate.draft.ngram import NgramTables
from forerun.theory import expected_tokens, predicted_speedup
from forerun_lab.reproduce.parts import Cell, ReportTable, Section, Settings
from forerun_lab.theory import acceptance_probability, expected_accepted

ROUNDS = 20_000
WORDS_000 = ("the", "cat", "sat", "on")
DRAFT_000, TARGET_000 = (0.72, 0.54, 0.81, 0.62), (0.85, 0.60, 0.31, 0.70)
PRINTED_000 = ("1.00", "1.00", "0.38", "-")
TREE_003 = ("a b c e", "a b c f", "a b d g", "a b d h")
PACKED_003 = "a b c e f d g h"
DRAFTED_004, VERIFIED_004 = ("quick", "brown", "fox", "jumps"), ("quick", "brown", "fox", "jumped", "over")

NOTES_004 = (
    "One sequence cannot hold the printed counts: what follows `on the mat` would be counted too, and the four-gram "
    "found; the tables were fed pieces, as of several texts.",
    "The printed sum counts its last term twice (2.06 at rate 0.7); the one that is meant gives ours.",
    "It is said that speculation never hurts. At low rates it does where a verification costs more than a decode, "
    "which is why lengths adapt here.",
)


def decide(
    rule: str, logits: Sequence[Sequence[float]], drafts: Drafts, temperature: float, seeds: Sequence[int]
) -> list[list[int]]:
    """Token ids that ``rule`` emits for each draft, one sequence each; ``logits`` [nodes + 1, vocabulary] of one "
    "of them."""
    rows = torch.tensor(logits, dtype=torch.float32)
    params = SamplingParams(temperature=temperature, max_tokens=64)
    sequences = [RequestState(number, [0], 1, params, seed) for number, seed in enumerate(seeds)]
    first = list(range(0, len(rows) * len(seeds), len(rows)))
    scores = Scores(sequences, list(drafts), first, rows.repeat(len(seeds), 1))
    result = rules[rule]().accept(scores, Sampler(rows.shape[1]))
    return [verdict.decided_tokens(draft) for draft, verdict in zip(drafts, result, strict=True)]


def reference_000(settings: Settings) -> ReportTable:
    """Two words a position: the drafted one, with the printed probabilities, and all others together."""
    p = [[1 - x, x] for x in TARGET_000] + [[0.5, 0.5]]
    q = torch.tensor([[1 - x, x] for x in DRAFT_000])
    logits = torch.tensor(p).log().tolist()
    drafts = [Draft.chain([1] * 4, q, range(4)) for _ in range(ROUNDS)]
    emitted = decide("token", logits, drafts, 1.0, range(ROUNDS))
    kept = [len(tokens) - 1 for tokens in emitted]
    three = sum(count == 2 for count in kept)
    rows: list[list[Cell]] = []
    reached = ROUNDS
    for index, word in enumerate(WORDS_000):
        passed = sum(count > index for count in kept)
        chance = float(acceptance_probability(TARGET_000[index], DRAFT_000[index]))
        fraction = f"{passed / reached:.3f} of {reached:,}"
        rows.append(
            [index + 1, word, DRAFT_000[index], TARGET_000[index], PRINTED_000[index], f"{chance:.2f}", fraction]
        )
        reached = passed
    columns = [
        "pos",
        "draft token",
        "p_draft",
        "p_target",
        "accept, printed",
        "ours",
        "rule `token`, kept of those reached",
    ]
    return ReportTable(
        columns, rows, [f"Position 3 was rejected, and three tokens emitted, in {three:,} of {ROUNDS:,} rounds."]
    )


def reference_003(settings: Settings) -> ReportTable:
    """The prefix tree of four drafts, and greedy decoding along it for every child that the target could prefer."""
    letters = sorted({letter for line in TREE_003 for letter in line.split()})
    draft = Draft()
    for line in TREE_003:
        node = -1
        for letter in line.split()[2:]:
            node = draft.add(letters.index(letter), node)
    packed = "a b " + " ".join(letters[token] for token in draft.tokens)
    rows: list[list[Cell]] = [["packed as", PACKED_003, packed, _same(packed == PACKED_003)]]
    for requested in ("c e x", "d h x", "c x", "x"):
        logits = [
            _favour(letters, requested.split(), [letters[t] for t in draft.path_tokens(node)])
            for node in range(-1, len(draft))
        ]
        (tokens,) = decide("coupled", logits, [draft], 0.0, [0])
        result = " ".join(([*letters, "x"])[token] for token in tokens)
        rows.append([f"greedy text of p: {requested}", requested, result, _same(result == requested)])
    length = expected_tokens(0.8, 10)
    rows.append(["E[L], beta = 0.8, T = 10", "> 4", f"{length:.2f}", _same(length > 4)])
    return ReportTable(["what", "reference", "ours", "agrees"], rows)


def _favour(letters: Sequence[str], text: Sequence[str], path: Sequence[str]) -> list[float]:
    """Logits whose best token is what follows ``path`` in ``text``; off the text, the odd one out."""
    on = list(text[: len(path)]) == list(path) and len(path) < len(text)
    requested = ([*letters, "x"]).index(text[len(path)] if on else "x")
    return [float(token == requested) for token in range(len(letters) + 1)]


def reference_004(settings: Settings) -> ReportTable:
    words = list(dict.fromkeys([*DRAFTED_004, *VERIFIED_004]))
    logits = [[float(word == requested) for word in words] for requested in VERIFIED_004]
    (tokens,) = decide("coupled", logits, [Draft.chain([words.index(word) for word in DRAFTED_004])], 0.0, [0])
    result = " ".join(words[token] for token in tokens)
    rows: list[list[Cell]] = [
        ["accepted tokens", "quick brown fox jumped", result, _same(result == "quick brown fox jumped")]
    ]
    trace, counts = ngram_trace()
    rows.append(["draft behind `the cat sat`", "on the mat .", trace, _same(trace == "on the mat .")])
    rows.append(["its first counts", "on 47, down 3, and 1", counts, _same(counts == "on 47, down 3, and 1")])
    for alpha, printed in ((0.5, "0.94"), (0.7, "2.05"), (0.9, "3.28")):
        kept = f"{expected_accepted(alpha, 4):.2f}"
        rows.append([f"drafts kept of 4, rate {alpha}", printed, kept, _same(kept == printed)])
    slow = predicted_speedup(0.2, 4, 0.0, 1.3)
    rows.append(["speed-up, rate 0.2, a verification at 1.3", "never hurts", f"{slow:.2f}", _same(slow >= 1)])
    return ReportTable(["what", "reference", "ours", "agrees"], rows, NOTES_004)


def ngram_trace() -> tuple[str, str]:
    """The drafter's tables after pieces of text with the printed counts: its draft, and the first counts."""
    pieces = [
        ("the cat sat on", 47),
        ("the cat sat down", 3),
        ("the cat sat and", 1),
        ("cat sat on the", 31),
        ("sat on the mat", 23),
        ("the mat .", 5),
    ]
    words = list(dict.fromkeys(word for text, _ in pieces for word in text.split()))
    tables = NgramTables(max_order=4, max_history=512)
    for text, times in pieces:
        for _ in range(times):
            tables.seen.clear()
            tables.update([words.index(word) for word in text.split()])
    drafted, _ = tables.predict([words.index(word) for word in ("the", "cat", "sat")], 4)
    counted = tables.counts[tuple(words.index(word) for word in ("the", "cat", "sat"))]
    ranked = sorted(counted.items(), key=lambda item: -item[1])
    return " ".join(words[t] for t in drafted), ", ".join(f"{words[t]} {n}" for t, n in ranked)


def _same(holds: bool) -> str:
    return "yes" if holds else "NO"


PARTS = [
    Section(
        "reference-000",
        "A round of four drafted tokens",
        "Reference 000, table",
        "The share kept is counted over random rounds of the rule that serves, so it has a sampling error of 0.003.",
        reference_000,
    ),
    Section(
        "reference-003",
        "Greedy decoding along a tree",
        "Reference 003, 2.1 and appendix A",
        "The drawing of the greedy example is not in the text that we have: the tree is that of section 2.1.",
        reference_003,
    ),
    Section(
        "reference-004",
        "n-gram drafts, step by step",
        "Reference 004, The Core Idea; Prediction",
        "See the notes.",
        reference_004,
    ),
]
