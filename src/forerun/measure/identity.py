"""Same seed, same tokens: speculation against decoding one token at a time, one request at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.engine.config import SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job, TokenLogprobs
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.methods import labels, tree_of
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft import Drafter, DrafterConfig, drafters

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
    return [
        SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed + i, ignore_eos=True, **MIXES[i % len(MIXES)]
        )
        for i in range(count)
    ]


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
    config = replace(
        llm.config, max_num_seqs=concurrency, page_size=page_size, max_model_len=min(longest, llm.engine.max_model_len)
    )
    engine = Engine(llm.model, llm.tokenizer, config, SpeculativeConfig.parse(speculative))
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
    llm: LLM,
    methods: Sequence[Mapping[str, Any]],
    prompts: Sequence[list[int]],
    *,
    trees: bool,
    temperatures: Sequence[float],
    max_tokens: int,
    page_sizes: Sequence[int | None],
    concurrency: int,
    seed: int,
    step: Callable[[str], None],
) -> Iterator[Result]:
    """One result per method (a ``speculative_config``), layout and temperature. Layouts, sampling options and a
    method's variants take turns over the prompts. ``trees`` adds hand-made ones."""
    for temperature in temperatures:
        params = requests(len(prompts), temperature, max_tokens, seed)
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
        for name, options in [*cases, *([(METHOD, [None])] if trees else [])]:
            for number, page_size in enumerate(page_sizes):
                step(f"{name}, {layout_name(page_size)}, temperature {temperature:g}")
                chosen = list(range(number, len(prompts), len(page_sizes)))
                totals, wrong, idle = [], [], []
                for turn, config in enumerate(options):
                    mine = chosen[turn :: len(options)]
                    if not mine:
                        idle.append(_kind(config))
                        continue
                    with hand_made(texts) if config is None else nullcontext(config) as speculative:
                        result, total = answers(
                            llm,
                            speculative,
                            [prompts[i] for i in mine],
                            [params[i] for i in mine],
                            concurrency=concurrency,
                            page_size=page_size,
                        )
                    totals.append(total)
                    if not total.num_draft_tokens:
                        idle.append(_kind(config))
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
    return Result(
        "same-seed identity", what, layout, temperature, good, count, "prompts", right and tested, detail, tested=tested
    )


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

    Where nothing was tested (no draft, no verification, too few samples), ``tested`` and ``passed`` are both False and
    ``detail`` says why.
    """

    check: str
    what: str
    layout: str
    temperature: float | None
    good: int
    total: int
    unit: str
    passed: bool
    detail: str = ""
    p_value: float | None = None
    tested: bool = True

    def __post_init__(self) -> None:
        assert self.tested or not self.passed, "what was not tested has not passed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def layout_name(page_size: int | None) -> str:
    return "slotted" if page_size is None else f"paged {page_size}"


METHOD = "hand_made_tree"
SHAPES = (
    (-1, -1, 0, 0, 1, 3, 3),
    (-1, 0, 0, 2, 2, 4),
    (-1, -1, -1, 1, 3, 4),
    (-1, 0, 1, 2),
    (-1, -1, -1),
)
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

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
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
    drafters.register(METHOD)(HandMade)
    config: Any = HandMadeConfig(texts=tuple(tuple(text) for text in texts))
    try:
        yield SpeculativeConfig(METHOD, drafter=config)
    finally:
        drafters.remove(METHOD)
