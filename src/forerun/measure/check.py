"""Is speculation lossless here, on this model? Identity, bit equality and distribution, each with its own oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft
from forerun.engine.config import SpeculativeConfig
from forerun.engine.jobs import Job, TokenLogprobs
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.config import ALL, REPETITIVE, SAMPLES, CheckConfig
from forerun.measure.environment import environment
from forerun.measure.methods import labels, method_configs, runnable, tree_of
from forerun.measure.prompts import make_prompts
from forerun.measure.rounds import engine_of, seeded
from forerun.models.architectures.spec import refusal
from forerun.models.base import Model, new_attention
from forerun.models.invariance import BRANCHES, self_test
from forerun.models.kinds import UNQUANTIZED
from forerun.models.load import load_model
from forerun.models.open import read_config, resolve
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import Drafter, DrafterConfig, drafters

DISTRIBUTION_PROMPT = 14
"""Tokens of the prompt whose continuations are counted; it repeats itself, for drafters that look back."""


def run_checks(config: CheckConfig, step: Callable[[str], None] = lambda note: None) -> dict[str, Any]:
    """``{"passed": bool, "tested": bool, "environment": ..., "results": [...], "left_out": {method: why}}``: whether
    every result passed, and whether every one tested something. Raises ForerunError subclasses."""
    options = method_configs(config.methods, ("coupled",), ("fixed",), (), config.speculative)[1:]
    llm = LLM(**config.engine, threads=torch.get_num_threads(), speculative_config=None)
    left_out: dict[str, str] = {}
    if ALL in config.methods:
        step("building every method")
        options, left_out = runnable(llm, options)
    prompts = make_prompts(
        config.prompt_set, llm.tokenizer, count=config.prompts, length=config.prompt_tokens, seed=config.seed
    )
    results = list(check_identity(config, llm, options, prompts, step))
    results += _bits(config, llm, prompts, step)
    if config.samples:
        prompt = make_prompts(REPETITIVE, llm.tokenizer, count=1, length=DISTRIBUTION_PROMPT, seed=config.seed)[0]
        cases = [{**item, "accept": rule} for item in options for rule in config.accepts]
        if ALL in config.methods:
            cases, not_with = runnable(llm, cases)
            left_out |= not_with
        for name, case in zip(labels(cases, ("accept",)), cases, strict=True):
            step(f"distribution, {name}, {case['accept']}")
            results.append(check_distribution(llm, case, prompt, samples=config.samples, seed=config.seed, name=name))
    return {
        "passed": all(result.passed for result in results),
        "tested": all(result.tested for result in results),
        "environment": environment(llm, config.engine),
        "results": [result.as_dict() for result in results],
        "left_out": left_out,
    }


def _bits(config: CheckConfig, llm: LLM, prompts: Sequence[list[int]], step: Callable[[str], None]) -> list[Result]:
    """On every path that runs this model; the layouts take turns over the prompts."""
    params = seeded(len(prompts), config.seed, temperature=1.0, max_tokens=config.max_tokens, ignore_eos=True)
    result, _ = answers(llm, None, prompts, params, concurrency=config.concurrency)
    pairs = [(prompt, group[0].tokens) for prompt, group in zip(prompts, result)]
    layouts = len(config.page_sizes)
    results = []
    encodes = llm.model.info.encoder is not None
    for path in ("native",) if encodes else ("native", "hf"):
        if path == "native" and not encodes and refusal(read_config(resolve(llm.config.model))) is not None:
            continue
        if llm.model.info.path.startswith(path):
            model = llm.model
        elif config.engine.get("quantization") not in (None, UNQUANTIZED) or llm.config.tensor_parallel_size > 1:
            continue
        else:
            requested = replace(llm.config, model_path=path)
            model = load_model(
                requested.model,
                dtype=requested.dtype,
                device=requested.device,
                invariant=requested.invariant,
                model_path=path,
                lora=requested.lora,
            )
        for turn, page_size in enumerate(config.page_sizes):
            step(f"bits, {model.info.path}")
            results += check_bits(model, pairs[turn::layouts], page_size)
    return results


def steps(config: CheckConfig) -> int:
    """About how many steps ``run_checks`` reports."""
    methods = len(list(drafters)) if ALL in config.methods else len(config.methods)
    cases = methods + config.trees
    distributions = methods * len(config.accepts) if config.samples else 0
    return len(config.temperatures) * (1 + cases * len(config.page_sizes)) + 2 * len(config.page_sizes) + distributions


WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9)
"""Rows of the verifications, in turn."""


@torch.inference_mode()
def check_bits(
    model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], page_size: int | None
) -> list[Result]:
    """``pairs`` are prompts and answers. Two results: the rows of these
    texts' verifications (a single row is what decoding feeds, and is not counted), and hundreds of random rows in every
    way that tokens are fed (chunks, neighbours, trees)."""
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
        position, turn = start, 0
        while position < len(text):
            width = min(WIDTHS[turn % len(WIDTHS)], len(text) - position)
            rows = feed(text[position : position + width], position)
            requested = single[position - start : position - start + width]
            same = (rows == requested).all(dim=1)
            if not detail and not bool(same.all()):
                detail = (
                    f"{width} rows at position {position} differ by up to {float((rows - requested).abs().max()):.1e}"
                )
            if width > 1:
                good, total = good + int(same.sum()), total + width
            position, turn = position + width, turn + 1
    path, layout = model.info.path, layout_name(page_size)
    failures = [str(failure) for failure in self_test(model, page_size=page_size)]
    tested = total > 0
    if not tested:
        detail = "no answer has the two tokens of a verification: give more --max-tokens"
    return [
        Result("bit-equal logits", path, layout, None, good, total, "rows", good == total, detail, tested=tested),
        _self_tested(path, layout, model, failures),
    ]


def _self_tested(path: str, layout: str, model: Model, failures: Sequence[str]) -> Result:
    tested = bool(failures) or model.info.max_len > BRANCHES + 1
    detail = failures[0] if failures else "chunks, neighbours, trees"
    if not tested:
        detail = f"a context of {model.info.max_len} tokens leaves no two rows to compare"
    right, good = not failures, int(tested and not failures)
    return Result("bit-equal logits", f"{path}: self-test", layout, None, good, 1, "runs", right, detail, tested=tested)


SUPPORT = 2
LENGTH = 5
FEWEST = 5.0
"""Answers are counted together, from the rarest on, until they are expected so often."""
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
        fractions = torch.softmax((logits / temperature).where(logits >= least, -torch.inf), dim=1)
        distribution = {
            (*path, token): chance * float(row[token])
            for (path, chance), row in zip(distribution.items(), fractions)
            for token in row.nonzero()[:, 0].tolist()
        }
    return distribution


def chi_square(
    counts: Mapping[tuple[int, ...], int], distribution: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """p-value of the counts under the distribution, and the degrees of freedom. A count outside the distribution gives
    0."""
    total = sum(counts.values())
    if any(answer not in distribution for answer in counts):
        return 0.0, 0
    cells: list[tuple[int, float]] = []
    count, expected = 0, 0.0
    for answer, chance in sorted(distribution.items(), key=lambda item: item[1]):
        count, expected = count + counts.get(answer, 0), expected + chance * total
        if expected >= FEWEST:
            cells.append((count, expected))
            count, expected = 0, 0.0
    if cells:
        cells[-1] = (cells[-1][0] + count, cells[-1][1] + expected)
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0, 0
    statistic = sum((result - requested) ** 2 / requested for result, requested in cells)
    tail = torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return float(tail), freedom


def check_distribution(
    llm: LLM, options: Mapping[str, Any], prompt: list[int], *, samples: int = SAMPLES, seed: int = 0, name: str = ""
) -> Result:
    """Sample ``samples`` answers with seeds of their own and compare their frequencies with the exact distribution.
    ``name`` is what the result calls ``options``, else by their method."""
    params = seeded(samples, seed, temperature=1.0, top_k=SUPPORT, max_tokens=LENGTH, ignore_eos=True)
    result, total = answers(llm, options, [prompt] * samples, params, concurrency=BATCH)
    distribution = exact_distribution(llm, prompt, 1.0)
    counts = Counter(tuple(group[0].tokens) for group in result)
    p_value, freedom = chi_square(counts, distribution)
    inside = sum(count for answer, count in counts.items() if answer in distribution)
    detail = f"chi-square p = {p_value:.3f}, {freedom} degrees of freedom, {accepted(total)}"
    right = p_value >= SMALLEST_P and total.draft_error is None
    tested = not right or (freedom > 0 and total.num_draft_tokens > 0)
    if total.draft_error is not None:
        detail = f"the drafter failed: {total.draft_error}"
    elif not tested:
        detail = IDLE.format("") if freedom else f"{samples} samples cannot tell two answers apart: give more --samples"
    what, layout = f"{name or options['method']}, {options['accept']}", layout_name(None)
    return Result("distribution", what, layout, 1.0, inside, samples, "samples", right, detail, p_value, tested)


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
"""Sampling options; every prompt takes the next ones. Their number has no factor in common with 2 and 3, so that every
mix meets every layout and variant."""
TREE_NODES = 8
DRAFT_TEMPERATURE = 0.6


class CheckedAnswer(NamedTuple):
    """All that a client sees of one answer."""

    tokens: list[int]
    text: str
    reason: str | None
    stopped_by: str | int | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None

    @classmethod
    def of(cls, job: Job) -> CheckedAnswer:
        assert job.finish is not None
        return cls(
            job.output_ids, job.text, job.finish.reason, job.finish.stopped_by, job.logprobs, job.prompt_logprobs
        )


def requests(count: int, temperature: float, max_tokens: int, seed: int) -> list[SamplingParams]:
    each = seeded(count, seed, temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    return [params.clone(**MIXES[i % len(MIXES)]) for i, params in enumerate(each)]


ROOM = 160
"""Tokens of cache behind the longest answer, for drafts: a cache for whole contexts could take all memory."""


def answers(
    llm: LLM,
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    concurrency: int,
    page_size: int | None = None,
) -> tuple[list[list[CheckedAnswer]], RequestMetrics]:
    """Every prompt's answers, and what speculation did for all of them."""
    longest = max(len(prompt) + (options.max_tokens or 0) for prompt, options in zip(prompts, params)) + ROOM
    room = min(longest, llm.engine.max_model_len)
    engine = engine_of(llm, speculative, max_num_seqs=concurrency, page_size=page_size, max_model_len=room)
    jobs = [engine.add(prompt, options) for prompt, options in zip(prompts, params, strict=True)]
    while engine.busy:
        engine.step()
    metrics = RequestMetrics.merged([job.metrics for group in jobs for job in group])
    return [[CheckedAnswer.of(job) for job in group] for group in jobs], metrics


def accepted(total: RequestMetrics) -> str:
    return f"{total.num_accepted_draft_tokens} of {total.num_draft_tokens} drafted tokens accepted"


IDLE = "nothing was drafted{}: give more --prompts or --max-tokens, or another --prompt-set"


def variants(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configuration, the same with trees, and the same with a temperature of the drafter's own, as far as its
    method can have them."""
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


def check_identity(
    config: CheckConfig,
    llm: LLM,
    methods: Sequence[Mapping[str, Any]],
    prompts: Sequence[list[int]],
    step: Callable[[str], None] = lambda note: None,
) -> Iterator[Result]:
    """One result per method (a ``speculative_config``), layout and temperature. Layouts, sampling options and a
    method's variants take turns over the prompts. ``config.trees`` adds hand-made ones."""
    for temperature in config.temperatures:
        params = requests(len(prompts), temperature, config.max_tokens, config.seed)
        if llm.model.info.encoder is not None:
            params = [options.clone(prompt_logprobs=None) for options in params]  # an encoder gives none
        step(f"plain decoding, temperature {temperature:g}")
        plain, _ = answers(llm, None, prompts, params, concurrency=1)
        texts = []
        for prompt, group in zip(prompts, plain):
            first, source = llm.model.info.begin(prompt)
            texts += [[*(source or ()), *first, *answer.tokens] for answer in group]
        cases: list[tuple[str, Sequence[Mapping[str, Any] | None]]] = [
            (name, variants(options)) for name, options in zip(labels(methods, ()), methods, strict=True)
        ]
        for name, options in [*cases, *([(METHOD, [None])] if config.trees else [])]:
            for number, page_size in enumerate(config.page_sizes):
                step(f"{name}, {layout_name(page_size)}, temperature {temperature:g}")
                chosen = list(range(number, len(prompts), len(config.page_sizes)))
                totals, wrong, idle = [], [], []
                for turn, variant in enumerate(options):
                    mine = chosen[turn :: len(options)]
                    if not mine:
                        idle.append(_kind(variant))
                        continue
                    with hand_made(texts) if variant is None else nullcontext(variant) as speculative:
                        result, total = answers(
                            llm,
                            speculative,
                            [prompts[i] for i in mine],
                            [params[i] for i in mine],
                            concurrency=config.concurrency,
                            page_size=page_size,
                        )
                    totals.append(total)
                    if not total.num_draft_tokens:
                        idle.append(_kind(variant))
                    wrong += [(i, group) for i, group in zip(mine, result) if group != plain[i]]
                total = RequestMetrics.merged(totals)
                yield _result(name, layout_name(page_size), temperature, len(chosen), wrong, plain, total, idle)


def _kind(config: Mapping[str, Any] | None) -> str:
    """Which of a method's variants it is, in words; none for the one as it was asked for."""
    if config is None:
        return ""
    if "draft_temperature" in config:
        return " at a temperature of its own"
    return " in trees" if config.get("tree") or config.get("tree_nodes") else ""


def _result(
    name: str,
    layout: str,
    temperature: float,
    count: int,
    wrong: Sequence[tuple[int, list[CheckedAnswer]]],
    plain: Sequence[list[CheckedAnswer]],
    total: RequestMetrics,
    idle: Sequence[str],
) -> Result:
    """``idle``: the variants that drafted nothing, so that nothing was tested of them."""
    detail = accepted(total)
    if wrong:
        prompt, group = min(wrong, key=lambda item: item[0])
        detail = _difference(prompt, plain[prompt], group)
    elif total.draft_error is not None:
        detail = f"the drafter failed: {total.draft_error}"
    what = "hand-made trees" if name == METHOD else name
    right = not wrong and total.draft_error is None
    tested = not right or not idle
    if not tested:
        detail = IDLE.format(idle[0] if total.num_draft_tokens else "")
    good = count - len(wrong)
    return Result("same-seed identity", what, layout, temperature, good, count, "prompts", right, detail, tested=tested)


def _difference(prompt: int, plain: Sequence[CheckedAnswer], result: Sequence[CheckedAnswer]) -> str:
    index = next(i for i, (a, b) in enumerate(zip(plain, result)) if a != b)
    requested, got = plain[index], result[index]
    if requested.tokens == got.tokens:
        fields = [name for name in CheckedAnswer._fields if getattr(requested, name) != getattr(got, name)]
        return f"prompt {prompt} has the same tokens and another {', '.join(fields)}"
    slot = next(
        (i for i, (a, b) in enumerate(zip(requested.tokens, got.tokens)) if a != b),
        min(len(requested.tokens), len(got.tokens)),
    )
    change = f"{requested.tokens[slot : slot + 3]} became {got.tokens[slot : slot + 3]}"
    return f"prompt {prompt} differs from token {slot} on: {change}"


@dataclass(frozen=True)
class Result:
    """What was checked on how many cases, how many were right, and what the first wrong one looked like.

    Where nothing was tested (no draft, no verification, too few samples), ``tested`` is False and ``detail`` says why:
    it has not passed, though nothing was wrong.
    """

    check: str
    what: str
    layout: str
    temperature: float | None
    good: int
    total: int
    unit: str
    right: bool
    detail: str = ""
    p_value: float | None = None
    tested: bool = True

    @property
    def passed(self) -> bool:
        return self.right and self.tested

    def as_dict(self) -> dict[str, Any]:
        """``passed`` in place of ``right``."""
        result = asdict(self) | {"passed": self.passed}
        del result["right"]
        return result


def layout_name(page_size: int | None) -> str:
    return "slotted" if page_size is None else f"paged {page_size}"


METHOD = "hand_made_tree"
SHAPES = ((-1, -1, 0, 0, 1, 3, 3), (-1, 0, 0, 2, 2, 4), (-1, -1, -1, 1, 3, 4), (-1, 0, 1, 2), (-1, -1, -1))
"""Parents of every node; -1 is the root."""
DEEPEST = 4


@dataclass(frozen=True)
class HandMadeConfig(DrafterConfig):
    num_speculative_tokens: int = DEEPEST
    texts: tuple[tuple[int, ...], ...] = ()
    """Sources, if there are, prompts, and the answers of plain decoding: what a draft must contain to be accepted."""

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
        known = len(sequence.tokens)
        source = random.Random(f"{sequence.seed} {known}")
        shape = source.choice(SHAPES)
        depths: list[int] = []
        for parent in shape:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        truth = self._continuation(sequence)[: source.randrange(budget + 1)]
        path, node = [], source.randrange(len(shape))
        while node >= 0:
            path.append(node)
            node = shape[node]
        draft = Draft()
        nodes: dict[int, int] = {-1: -1}
        for index, (parent, depth) in enumerate(zip(shape, depths)):
            if depth > budget:
                continue
            if index in path and depth <= len(truth):
                token = truth[depth - 1]
            else:
                token = self._other(draft, nodes[parent], truth[depth - 1 : depth], source)
            nodes[index] = draft.add(token, nodes[parent])
        return draft

    def _continuation(self, sequence: RequestState) -> tuple[int, ...]:
        known = (*(sequence.source or ()), *sequence.tokens)
        for text in self.config.texts:
            if text[: len(known)] == known:
                return text[len(known) :]
        return ()

    def _other(self, draft: Draft, parent: int, truth: Sequence[int], source: random.Random) -> int:
        """A token that neither the text nor a sibling has."""
        taken = {*draft.children(parent), *truth}
        return next(t for t in iter(lambda: source.randrange(self.context.sampler.vocab_size), -1) if t not in taken)


@contextmanager
def hand_made(texts: Sequence[Sequence[int]]) -> Iterator[SpeculativeConfig]:
    """A configuration that drafts hand-made trees around ``texts``; the method exists inside the block only."""
    config = HandMadeConfig(texts=tuple(tuple(text) for text in texts))
    with drafters.lent(METHOD, HandMade):
        yield SpeculativeConfig(METHOD, drafter=config)
