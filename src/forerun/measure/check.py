"""``forerun check``: does speculation change anything, on this machine and with this model?

Three checks, each with an oracle of its own: every answer against plain decoding's for the same seed, the bits of
logits however rows are batched, and the frequencies of short answers against their exact distribution.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch

from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, node_paths
from forerun.engine.config import SpeculativeConfig
from forerun.engine.jobs import Job, TokenLogprobs
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.config import ALL, REPETITIVE, SAMPLES, CheckConfig
from forerun.measure.environment import environment
from forerun.measure.methods import labels, method_configs, runnable, tree_of
from forerun.measure.prompts import make_prompts
from forerun.measure.rounds import engine_of, seeded_params
from forerun.models.architectures.spec import refusal
from forerun.models.files.open import Checkpoint
from forerun.models.kinds import UNQUANTIZED
from forerun.models.load import load_model
from forerun.models.run.base import Model, new_attention
from forerun.models.run.invariance import BRANCHES, ROWS, runs_of, self_test
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import Drafter, DrafterConfig, drafters

SPEED_TOKENS = 16
"""Tokens by which the speed of plain decoding is measured."""
DISTRIBUTION_PROMPT = 14
"""Tokens of the prompt of the distribution check. It repeats itself, so that history drafters have matches."""


@dataclass(frozen=True)
class Result:
    """One check: ``good`` of ``total`` cases were right, and ``detail`` describes the first wrong one. A check without
    drafts, verifications or enough samples is not ``tested``: it has not ``passed``, and ``detail`` says why."""

    check: str
    what: str
    layout: str
    temperature: float | None
    good: int
    total: int
    unit: str
    detail: str
    passed: bool
    tested: bool = True
    p_value: float | None = None


def run_checks(
    config: CheckConfig,
    progress: Callable[[str], None] = lambda note: None,
    announce: Callable[[float], None] = lambda seconds: None,
) -> dict[str, Any]:
    """Run every check. Returns ``{"passed": bool, "tested": bool, "environment": ..., "results": [...], "left_out":
    {method: why}}``: whether all passed, and whether all tested something. ``announce`` is called with the seconds that
    this may take. Raises ForerunError subclasses."""
    options = method_configs(config.methods, ("coupled",), ("fixed",), (), config.speculative)[1:]
    llm = LLM(**config.engine, threads=torch.get_num_threads(), speculative_config=None)
    left_out: dict[str, str] = {}
    if ALL in config.methods:
        progress("building every method")
        options, left_out = runnable(llm, options)
    prompts = make_prompts(
        config.prompt_set, llm.tokenizer, count=config.prompts, length=config.prompt_tokens, seed=config.seed
    )
    announce(estimate(config, llm, prompts[0], len(options)))
    results = list(check_identity(config, llm, options, prompts, progress))
    results += _check_bits_of_paths(config, llm, prompts, progress)
    if config.samples:
        prompt = make_prompts(REPETITIVE, llm.tokenizer, count=1, length=DISTRIBUTION_PROMPT, seed=config.seed)[0]
        cases = [{**item, "accept": rule} for item in options for rule in config.accepts]
        if ALL in config.methods:
            cases, rule_left_out = runnable(llm, cases)
            left_out |= rule_left_out
        for name, case in zip(labels(cases, ("accept",)), cases, strict=True):
            progress(f"distribution, {name}, {case['accept']}")
            results.append(check_distribution(llm, case, prompt, samples=config.samples, seed=config.seed, name=name))
    return {
        "passed": all(result.passed for result in results),
        "tested": all(result.tested for result in results),
        "environment": environment(llm, config.engine),
        "results": [asdict(result) for result in results],
        "left_out": left_out,
    }


def steps(config: CheckConfig) -> int:
    """About how many steps ``run_checks`` reports to ``progress``."""
    methods = len(list(drafters)) if ALL in config.methods else len(config.methods)
    cases = methods + config.trees
    distributions = methods * len(config.accepts) if config.samples else 0
    return len(config.temperatures) * (1 + cases * len(config.page_sizes)) + 2 * len(config.page_sizes) + distributions


SELF_TEST = {"native": 4.6, "hf": 14.0}
"""What a row of the self-test costs on each path, in tokens of plain decoding: it is fed about twelve times."""


def estimate(config: CheckConfig, llm: LLM, prompt: list[int], methods: int) -> float:
    """About how many seconds the checks take, by the present speed of plain decoding."""
    params = seeded_params(1, config.seed, temperature=0.0, max_tokens=SPEED_TOKENS, ignore_eos=True)
    _, metrics = run_requests(llm, None, [prompt], params, concurrency=1)
    answers = config.prompts * config.max_tokens
    identity = len(config.temperatures) * (1 + methods + config.trees) * answers
    bits = 2 * 2 * answers  # two paths, each fed one by one and together
    for path in _path_names(config, llm):
        runs = runs_of(llm.model.info) if path == "hf" and config.rows is None else 1
        bits += len(config.page_sizes) * math.ceil(runs * SELF_TEST[path] * (config.rows or ROWS))
    distributions = methods * len(config.accepts) * config.samples * LENGTH if config.samples else 0
    return (identity + bits + distributions) / (metrics.tokens_per_second or 1.0)


def layout_name(page_size: int | None) -> str:
    return "slotted" if page_size is None else f"paged {page_size}"


class CheckedAnswer(NamedTuple):
    """All that a client sees of one answer."""

    tokens: list[int]
    text: str
    reason: str | None
    stopped_by: str | int | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None


DRAFT_TOKENS = 160
"""Cache beyond the longest answer, for drafts. A cache for whole contexts could take all memory."""


def run_requests(
    llm: LLM,
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    concurrency: int,
    page_size: int | None = None,
) -> tuple[list[list[CheckedAnswer]], RequestMetrics]:
    """Every prompt's answers (``n`` of them), and the metrics of all requests together."""
    longest = max(len(prompt) + (options.max_tokens or 0) for prompt, options in zip(prompts, params)) + DRAFT_TOKENS
    max_len = min(longest, llm.engine.max_model_len)
    engine = engine_of(llm, speculative, max_num_seqs=concurrency, page_size=page_size, max_model_len=max_len)
    jobs = [engine.add(prompt, options) for prompt, options in zip(prompts, params, strict=True)]
    while engine.busy:
        engine.step()
    metrics = RequestMetrics.merged([job.metrics for group in jobs for job in group])
    return [[_answer(job) for job in group] for group in jobs], metrics


def _answer(job: Job) -> CheckedAnswer:
    reason, stopped_by = (job.finish.reason, job.finish.stopped_by) if job.finish is not None else (None, None)
    return CheckedAnswer(job.output_ids, job.text, reason, stopped_by, job.logprobs, job.prompt_logprobs)


def accepted(total: RequestMetrics) -> str:
    return f"{total.num_accepted_draft_tokens} of {total.num_draft_tokens} drafted tokens accepted"


NOT_DRAFTED = "nothing was drafted{}: give more --prompts or --max-tokens, or another --prompt-set"

MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"min_p": 0.05, "logit_bias": {7: 1.0, 11: -5.0}},
    {"bad_words": ["self", "e", "return"]},
    {"logprobs": 3, "top_p": 0.95},
    {"n": 2, "top_k": 50, "allowed_token_ids": range(3, 60)},
    {"stop": ["):", "\n\n"], "min_tokens": 4},
    {"frequency_penalty": -0.3, "prompt_logprobs": 2, "logprobs": 0},
    {"top_p": 0.7, "stop": ["="], "include_stop_str_in_output": True, "logit_bias": {3: -100.0}},
    {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2, "bad_words": ["def"], "logprobs": 1, "n": 2},
)
"""Sampling options, which alternate over the prompts. Their number is prime to 2 and 3, so that every mix meets every
layout and variant."""
TREE_NODES = 8
DRAFT_TEMPERATURE = 0.6


def variants(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configuration, the same with trees and the same with a draft temperature, where its method has them."""
    result = [dict(config)]
    tree = tree_of(config, TREE_NODES)
    if tree is not None:
        result.append(tree)
    sharper = {**config, "draft_temperature": DRAFT_TEMPERATURE}
    try:
        SpeculativeConfig.parse(sharper)
    except ConfigError:
        return result
    return [*result, sharper]


def _variant_name(config: Mapping[str, Any] | None) -> str:
    """How a message names one of ``variants``; nothing for the configuration as it was requested."""
    if config is None:
        return ""
    if "draft_temperature" in config:
        return " at a temperature of its own"
    return " in trees" if config.get("tree") or config.get("tree_nodes") else ""


def check_identity(
    config: CheckConfig,
    llm: LLM,
    methods: Sequence[Mapping[str, Any]],
    prompts: Sequence[list[int]],
    progress: Callable[[str], None] = lambda note: None,
) -> Iterator[Result]:
    """Yields a result for each method (a ``speculative_config``), layout and temperature. Layouts, sampling options and
    a method's variants alternate over the prompts. ``config.trees`` adds hand-made trees."""
    for temperature in config.temperatures:
        params = seeded_params(
            len(prompts), config.seed, temperature=temperature, max_tokens=config.max_tokens, ignore_eos=True
        )
        params = [options.clone(**MIXES[i % len(MIXES)]) for i, options in enumerate(params)]
        if llm.model.info.encoder is not None:
            params = [options.clone(prompt_logprobs=None) for options in params]  # an encoder gives none
        progress(f"plain decoding, temperature {temperature:g}")
        plain, _ = run_requests(llm, None, prompts, params, concurrency=1)
        texts = []
        for prompt, group in zip(prompts, plain):
            first, source = llm.model.info.begin(prompt)
            texts += [[*(source or ()), *first, *answer.tokens] for answer in group]
        cases: list[tuple[str, Sequence[Mapping[str, Any] | None]]] = [
            (name, variants(options)) for name, options in zip(labels(methods, ()), methods, strict=True)
        ]
        for name, options in [*cases, *([("hand-made trees", [None])] if config.trees else [])]:
            for number, page_size in enumerate(config.page_sizes):
                layout = layout_name(page_size)
                progress(f"{name}, {layout}, temperature {temperature:g}")
                chosen = list(range(number, len(prompts), len(config.page_sizes)))
                metrics, idle = [], []
                wrong: dict[int, list[CheckedAnswer]] = {}
                for offset, variant in enumerate(options):
                    indices = chosen[offset :: len(options)]
                    if not indices:
                        idle.append(_variant_name(variant))
                        continue
                    with hand_made(texts) if variant is None else nullcontext(variant) as speculative:
                        answers, total = run_requests(
                            llm,
                            speculative,
                            [prompts[i] for i in indices],
                            [params[i] for i in indices],
                            concurrency=config.concurrency,
                            page_size=page_size,
                        )
                    metrics.append(total)
                    if not total.num_draft_tokens:
                        idle.append(_variant_name(variant))
                    wrong |= {i: group for i, group in zip(indices, answers) if group != plain[i]}
                total = RequestMetrics.merged(metrics)
                failed, detail = bool(wrong) or total.draft_error is not None, accepted(total)
                if wrong:
                    detail = _difference(min(wrong), plain[min(wrong)], wrong[min(wrong)])
                elif total.draft_error is not None:
                    detail = f"the drafter failed: {total.draft_error}"
                elif idle:
                    detail = NOT_DRAFTED.format(idle[0] if total.num_draft_tokens else "")
                yield Result(
                    "same-seed identity", name, layout, temperature, len(chosen) - len(wrong), len(chosen), "prompts",
                    detail, passed=not failed and not idle, tested=failed or not idle,
                )  # fmt: skip


def _difference(prompt: int, plain: Sequence[CheckedAnswer], result: Sequence[CheckedAnswer]) -> str:
    """Describes the first of a prompt's answers that differs from plain decoding's."""
    expected, got = next((a, b) for a, b in zip(plain, result) if a != b)
    if expected.tokens == got.tokens:
        fields = [name for name in CheckedAnswer._fields if getattr(expected, name) != getattr(got, name)]
        return f"prompt {prompt} has the same tokens and another {', '.join(fields)}"
    index = next(
        (i for i, (a, b) in enumerate(zip(expected.tokens, got.tokens)) if a != b),
        min(len(expected.tokens), len(got.tokens)),
    )
    change = f"{expected.tokens[index : index + 3]} became {got.tokens[index : index + 3]}"
    return f"prompt {prompt} differs from token {index} on: {change}"


def _check_bits_of_paths(
    config: CheckConfig, llm: LLM, prompts: Sequence[list[int]], progress: Callable[[str], None]
) -> list[Result]:
    """``check_bits`` on every path that runs this model; layouts alternate over the prompts."""
    params = seeded_params(len(prompts), config.seed, temperature=1.0, max_tokens=config.max_tokens, ignore_eos=True)
    answers, _ = run_requests(llm, None, prompts, params, concurrency=config.concurrency)
    pairs = [(prompt, group[0].tokens) for prompt, group in zip(prompts, answers)]
    results = []
    for model in _paths(config, llm):
        for number, page_size in enumerate(config.page_sizes):
            progress(f"bits, {model.info.path}")
            results += check_bits(model, pairs[number :: len(config.page_sizes)], page_size, config.rows)
    return results


def _path_names(config: CheckConfig, llm: LLM) -> list[str]:
    info, options = llm.model.info, llm.config
    if info.encoder is not None:
        return ["native"]
    paths = ["native", "hf"] if refusal(Checkpoint.open(options.model).config) is None else ["hf"]
    as_saved = config.engine.get("quantization") in (None, UNQUANTIZED) and options.tensor_parallel_size == 1
    return [path for path in paths if as_saved or info.path.startswith(path)]


def _paths(config: CheckConfig, llm: LLM) -> Iterator[Model]:
    """Yields the model on our path and on transformers', as far as it has both; quantized or sharded, as it is loaded.
    An encoder-decoder has our path only."""
    options = llm.config
    for path in _path_names(config, llm):
        if llm.model.info.path.startswith(path):
            yield llm.model
        else:
            yield load_model(
                options.model,
                dtype=options.dtype,
                device=options.device,
                invariant=options.invariant,
                model_path=path,
                lora=options.lora,
            )


WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9)
"""Rows of one verification after another."""


@torch.inference_mode()
def check_bits(
    model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], page_size: int | None, most: int | None = None
) -> list[Result]:
    """Logits of rows fed together, compared with the same rows fed one by one. ``pairs`` are prompts and answers.
    Returns two results: verifications of these answers, and the self-test, which feeds hundreds of random rows, or
    ``most``, in chunks, beside neighbours and in trees."""
    good, total, detail = 0, 0, ""
    longest = max(len(prompt) + len(answer) + 1 for prompt, answer in pairs)
    attention = new_attention(model, max_seqs=1, max_len=longest, page_size=page_size, slack=max(WIDTHS))

    def feed(tokens: Sequence[int], start: int) -> torch.Tensor:
        span = Span(0, start, list(tokens), logits=list(range(len(tokens))), source=source)
        return model.forward(Batch([span], model.info.device), attention).logits

    for prompt, answer in pairs:
        begin, source = model.info.begin(prompt)
        text, start = [*begin, *answer], len(begin)
        attention.pool.free(0)
        feed(text[:start], 0)
        single = torch.cat([feed(text[i : i + 1], i) for i in range(start, len(text))])
        attention.pool.truncate(0, start)
        position, widths = start, cycle(WIDTHS)
        while position < len(text):
            rows = feed(text[position : position + next(widths)], position)
            expected = single[position - start :][: len(rows)]
            same = (rows == expected).all(dim=1)
            if not detail and not bool(same.all()):
                largest = float((rows - expected).abs().max())
                detail = f"{len(rows)} rows at position {position} differ by up to {largest:.1e}"
            if len(rows) > 1:  # decoding feeds single rows itself
                good, total = good + int(same.sum()), total + len(rows)
            position += len(rows)
    path, layout = model.info.path, layout_name(page_size)
    if not total:
        detail = "no answer has the two tokens of a verification: give more --max-tokens"
    return [
        Result("bit-equal logits", path, layout, None, good, total, "rows", detail, 0 < good == total, total > 0),
        _self_test_result(path, layout, model, [*map(str, self_test(model, page_size=page_size, rows=most))]),
    ]


def _self_test_result(path: str, layout: str, model: Model, failures: Sequence[str]) -> Result:
    tested = bool(failures) or model.info.max_len > BRANCHES + 1
    detail = failures[0] if failures else "chunks, neighbours, trees"
    if not tested:
        detail = f"a context of {model.info.max_len} tokens leaves no two rows to compare"
    passed = tested and not failures
    return Result(
        "bit-equal logits", f"{path}: self-test", layout, None, int(passed), 1, "runs", detail, passed, tested
    )


SUPPORT = 2
"""Tokens that can be sampled at each position: the likeliest ones."""
LENGTH = 5
"""Tokens of an answer."""
LEAST_EXPECTED = 5.0
"""Answers are pooled, from the rarest on, into cells that are expected at least this often."""
BATCH = 64
SMALLEST_P = 1e-4
"""A smaller p-value is a failure: one false alarm in ten thousand checks."""


@torch.inference_mode()
def exact_distribution(llm: LLM, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Probability, float64, of every answer of LENGTH tokens when the SUPPORT likeliest tokens can be sampled."""
    model, (begin, source) = llm.model, llm.model.info.begin(prompt)
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        attention = new_attention(model, max_seqs=len(distribution), max_len=len(prompt) + LENGTH)
        spans = [
            Span(i, 0, [*begin, *path], logits=[len(begin) + len(path) - 1], source=source)
            for i, path in enumerate(distribution)
        ]
        logits = model.forward(Batch(spans, model.info.device), attention).logits.double().cpu()
        least = logits.topk(SUPPORT, dim=1).values[:, -1:]  # ties with the last one can be sampled too
        rows = torch.softmax((logits / temperature).where(logits >= least, -torch.inf), dim=1)
        distribution = {
            (*path, token): p * float(row[token])
            for (path, p), row in zip(distribution.items(), rows)
            for token in row.nonzero()[:, 0].tolist()
        }
    return distribution


def chi_square(
    counts: Mapping[tuple[int, ...], int], distribution: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """p-value of the counts under the distribution, and degrees of freedom; p = 0 if it rules out a counted answer."""
    total = sum(counts.values())
    if any(answer not in distribution for answer in counts):
        return 0.0, 0
    cells: list[tuple[int, float]] = []
    count, expected = 0, 0.0
    for answer, p in sorted(distribution.items(), key=lambda item: item[1]):
        count, expected = count + counts.get(answer, 0), expected + p * total
        if expected >= LEAST_EXPECTED:
            cells.append((count, expected))
            count, expected = 0, 0.0
    if cells:
        cells[-1] = (cells[-1][0] + count, cells[-1][1] + expected)
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0, 0
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    tail = torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return float(tail), freedom


def check_distribution(
    llm: LLM, options: Mapping[str, Any], prompt: list[int], *, samples: int = SAMPLES, seed: int = 0, name: str = ""
) -> Result:
    """Sample answers with ``samples`` different seeds and compare their frequencies with the exact distribution.
    ``name`` is the result's name for ``options``, by default their method."""
    params = seeded_params(samples, seed, temperature=1.0, top_k=SUPPORT, max_tokens=LENGTH, ignore_eos=True)
    answers, total = run_requests(llm, options, [prompt] * samples, params, concurrency=BATCH)
    distribution = exact_distribution(llm, prompt, 1.0)
    counts = Counter(tuple(group[0].tokens) for group in answers)
    p_value, freedom = chi_square(counts, distribution)
    good = sum(count for answer, count in counts.items() if answer in distribution)
    detail = f"chi-square p = {p_value:.3f}, {freedom} degrees of freedom, {accepted(total)}"
    failed = p_value < SMALLEST_P or total.draft_error is not None
    tested = failed or (freedom > 0 and total.num_draft_tokens > 0)
    if total.draft_error is not None:
        detail = f"the drafter failed: {total.draft_error}"
    elif not freedom and not failed:
        detail = f"{samples} samples cannot tell two answers apart: give more --samples"
    elif not tested:
        detail = NOT_DRAFTED.format("")
    what, passed = f"{name or options['method']}, {options['accept']}", tested and not failed
    return Result(
        "distribution", what, layout_name(None), 1.0, good, samples, "samples", detail, passed, tested, p_value
    )


METHOD = "hand_made_tree"
SHAPES = ((-1, -1, 0, 0, 1, 3, 3), (-1, 0, 0, 2, 2, 4), (-1, -1, -1, 1, 3, 4), (-1, 0, 1, 2), (-1, -1, -1))
"""Parents of every node; -1 is the root."""
DEEPEST = 4


@dataclass(frozen=True)
class HandMadeConfig(DrafterConfig):
    num_speculative_tokens: int = DEEPEST
    texts: tuple[tuple[int, ...], ...] = ()
    """Encoder inputs, if any, prompts and plain decoding's answers: the tokens that will be accepted."""

    @property
    def branches(self) -> bool:
        return True

    def nodes_by_depth(self) -> list[int]:
        return [0] + [max(map(len, SHAPES))] * self.num_speculative_tokens


class HandMade(Drafter[HandMadeConfig]):
    """Hides the next tokens of the known text, some or all, on one path of a tree of other tokens."""

    name = METHOD
    config_class = HandMadeConfig

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: RequestState, budget: int) -> Draft:
        rng = random.Random(f"{sequence.seed} {len(sequence.tokens)}")
        shape = rng.choice(SHAPES)
        paths = node_paths(shape)
        truth = self._continuation(sequence)[: rng.randrange(budget + 1)]
        path = paths[rng.randrange(len(shape))]
        draft = Draft()
        nodes: dict[int, int] = {-1: -1}
        for index, (parent, depth) in enumerate(zip(shape, map(len, paths))):
            if depth > budget:
                continue
            if index in path and depth <= len(truth):
                token = truth[depth - 1]
            else:
                token = self._other(draft, nodes[parent], truth[depth - 1 : depth], rng)
            nodes[index] = draft.add(token, nodes[parent])
        return draft

    def _continuation(self, sequence: RequestState) -> tuple[int, ...]:
        prefix = (*(sequence.source or ()), *sequence.tokens)
        return next((text[len(prefix) :] for text in self.config.texts if text[: len(prefix)] == prefix), ())

    def _other(self, draft: Draft, parent: int, truth: Sequence[int], rng: random.Random) -> int:
        """A token that neither the text nor a sibling has."""
        taken = {*draft.children(parent), *truth}
        return next(t for t in iter(lambda: rng.randrange(self.context.sampler.vocab_size), -1) if t not in taken)


@contextmanager
def hand_made(texts: Sequence[Sequence[int]]) -> Iterator[SpeculativeConfig]:
    """A configuration that drafts hand-made trees around ``texts``; the method exists inside the block only."""
    config = HandMadeConfig(texts=tuple(tuple(text) for text in texts))
    with drafters.lent(METHOD, HandMade):
        yield SpeculativeConfig(METHOD, drafter=config)
