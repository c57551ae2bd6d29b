"""Forerun's drafters in vLLM: a proposer for its ``custom_class`` method (V1 model runner; tried with 0.32).

    LLM(
        model,
        speculative_config={"method": "custom_class", "model": "forerun.vllm.Proposer", "num_speculative_tokens": 5},
        additional_config={"forerun": {"method": "suffix"}},
    )

``additional_config["forerun"]`` is a ``speculative_config`` of ours, without ``num_speculative_tokens``; ``module`` is
imported first, for a drafter of your own. vLLM shows a proposer nothing but token ids, and takes chains: drafters that
run a model, read hidden states or draft for grammars are refused, and of a tree the first branch is taken.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.models.tokenizer import load_tokenizer
from forerun.sampling.draw import Sampler
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig
from forerun.speculate.draft.table import TokenRecycling
from forerun.speculate.names import drafters, rules

KEY = "forerun"
"""In vLLM's ``additional_config``."""
DEFAULT = "ngram"
GREEDY = SamplingParams(temperature=0.0)
"""What drafts are made for: vLLM takes every draft as a point mass, so that the likeliest is the best."""


class Proposer:
    """vLLM makes one per worker, from its ``VllmConfig``, and asks it after every step.

    Raises ConfigError for a method that cannot draft from ids alone, and for options that it does not have.
    """

    def __init__(self, vllm_config: Any) -> None:
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        options = dict((getattr(vllm_config, "additional_config", None) or {}).get(KEY) or {})
        self.max_model_len = int(model.max_model_len)
        self.budget = int(speculative.num_speculative_tokens)
        self.drafter = _build(
            options,
            self.budget,
            vocab_size=int(model.get_vocab_size()),
            max_model_len=self.max_model_len,
            max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
            tokenizer=str(model.tokenizer or model.model),
        )
        self._rows: list[RequestState] = []
        """What was in the batch's rows at the last step."""
        self._ids = itertools.count()

    def load_model(self, *given: Any, **named: Any) -> None:
        """There is none."""

    def dummy_run(self, *given: Any, **named: Any) -> None:
        """There is nothing to warm up."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafted ids for each row of the batch; none where nothing was sampled. ``token_ids_cpu`` [rows, longest]
        holds the rows' tokens, ``num_tokens_no_spec`` [rows] how many there are, the sampled ones included."""
        rows = [token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist() for row in range(len(sampled_token_ids))]
        sequences = self._follow(rows, sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in rows]
        asked = [
            (row, min(self.budget, self.max_model_len - len(rows[row]) - 1))
            for row, sampled in enumerate(sampled_token_ids)
            if len(sampled)
        ]
        asked = [(row, budget) for row, budget in asked if budget > 0]
        if asked:
            chosen = [sequences[row] for row, _ in asked]
            made = self.drafter.propose(chosen, [budget for _, budget in asked])
            for (row, _), draft in zip(asked, made, strict=True):
                drafts[row] = first_branch(draft)
        return drafts

    def _follow(self, rows: Sequence[list[int]], sampled: Sequence[Sequence[int]]) -> list[RequestState]:
        """The rows' sequences. vLLM does not say which request is in a row: it is the one whose tokens the row begins
        with. The sequences that are in no row any more are released."""
        left = dict(enumerate(self._rows))
        result: list[RequestState | None] = [None] * len(rows)

        def take(row: int, index: int) -> None:
            if result[row] is None and index in left and _continues(rows[row], left[index]):
                result[row] = left.pop(index)

        for row in range(len(rows)):
            take(row, row)
        for row in range(len(rows)):
            for index in sorted(left, key=lambda index: -len(left[index].tokens)):
                take(row, index)
        for sequence in left.values():
            sequence.num_computed_tokens = len(sequence.tokens)  # it has ended: its output may be learnt from
            self.drafter.release(sequence)
        self._rows = [self._grown(known, row, new) for known, row, new in zip(result, rows, sampled)]
        return self._rows

    def _grown(self, known: RequestState | None, tokens: list[int], sampled: Sequence[int]) -> RequestState:
        if known is None:
            known = RequestState(next(self._ids), [], max(0, len(tokens) - len(sampled)), GREEDY, seed=0)
        if isinstance(self.drafter, TokenRecycling):
            self.drafter.follow(tokens[max(0, len(known.tokens) - 1) :])
        known.tokens = tokens
        return known


def _continues(row: list[int], sequence: RequestState) -> bool:
    count = len(sequence.tokens)
    return len(row) >= count and row[:count] == sequence.tokens


def first_branch(draft: Draft) -> list[int]:
    """The tokens of a draft's path of first trials, which its drafter likes best."""
    tokens: list[int] = []
    node = -1
    while len(draft) and draft.trials[node + 1]:
        node = draft.trials[node + 1][0].node
        tokens.append(draft.tokens[node])
    return tokens


def _build(
    options: Mapping[str, Any], budget: int, *, vocab_size: int, max_model_len: int, max_num_seqs: int, tokenizer: str
) -> Drafter[DrafterConfig]:
    """The drafter that ``options`` ask for."""
    rest = dict(options)
    if (module := rest.pop("module", None)) is not None:
        importlib.import_module(module)
    if rest.get("num_speculative_tokens", budget) != budget:
        raise ConfigError(f"num_speculative_tokens is {budget} in vLLM's speculative_config: leave it out of {KEY!r}")
    method = rest.pop("method", DEFAULT)
    kind = drafters[method]
    config = kind.config_class.from_dict(method, {**rest, "num_speculative_tokens": budget})
    if config.branches:
        raise ConfigError("vLLM takes chains: leave 'tree' and 'tree_nodes' out")
    needs = kind.needs
    if needs.hidden or needs.model or needs.grammar or "model" in {*vars(config)}:
        raise ConfigError(f"method {method!r} needs more than token ids, which is all that vLLM shows a proposer")
    info = SimpleNamespace(vocab_size=vocab_size, max_len=max_model_len, device="cpu", eos_ids=frozenset())
    context = DraftContext(
        target=SimpleNamespace(info=info),  # all that drafters of point masses ask of it
        sampler=Sampler(vocab_size),
        rule=rules["coupled"](None),
        tokenizer=load_tokenizer(tokenizer),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    return kind.build(config, context)
