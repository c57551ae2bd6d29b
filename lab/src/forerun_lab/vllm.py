"""Forerun's drafters in vLLM: a proposer for its ``custom_class`` method (V1 model runner; tried with 0.32).

    LLM(
        model,
        speculative_config={
            "method": "custom_class", "model": "forerun_lab.vllm.Proposer", "num_speculative_tokens": 5,
        },
        additional_config={"forerun": {"method": "suffix"}},
    )

``additional_config["forerun"]`` is a ``speculative_config`` of ours, without ``num_speculative_tokens``. Its key
``module`` names a module to import first, with a drafter of your own. vLLM gives a proposer nothing but token ids, and
takes chains. So drafters that run a model, read hidden states or draft for grammars are refused, and of a tree only
the first branch is used.
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
from forerun.models.text.tokenizer import load_tokenizer
from forerun.sampling.draw import Sampler
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig
from forerun.speculate.names import drafters, rules
from forerun_lab.drafters.token_recycling import TokenRecycling

KEY = "forerun"
"""In vLLM's ``additional_config``."""
DEFAULT = "ngram"
GREEDY = SamplingParams(temperature=0.0)
"""The drafters' sampling options: vLLM takes every draft as a point mass, so that the likeliest token is the best."""


class Proposer:
    """Drafts for vLLM, which makes one per worker from its ``VllmConfig`` and calls it after every step.

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
        """The sequence in each row of the batch at the last step."""
        self._ids = itertools.count()

    def load_model(self, *given: Any, **named: Any) -> None:
        """Does nothing: there is no model."""

    def dummy_run(self, *given: Any, **named: Any) -> None:
        """Does nothing: there is nothing to warm up."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns drafted ids for each row of the batch; none where nothing was sampled.

        ``token_ids_cpu`` [rows, longest] holds the rows' tokens, ``num_tokens_no_spec`` [rows] how many there are, the
        sampled ones included.
        """
        rows = [token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist() for row in range(len(sampled_token_ids))]
        sequences = self._follow(rows, sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in rows]
        budgets = {
            row: min(self.budget, self.max_model_len - len(rows[row]) - 1)
            for row, sampled in enumerate(sampled_token_ids)
            if len(sampled)
        }
        budgets = {row: budget for row, budget in budgets.items() if budget > 0}
        if budgets:
            made = self.drafter.propose([sequences[row] for row in budgets], list(budgets.values()))
            for row, draft in zip(budgets, made, strict=True):
                drafts[row] = first_branch(draft)
        return drafts

    def _follow(self, rows: Sequence[list[int]], sampled: Sequence[Sequence[int]]) -> list[RequestState]:
        """Returns the rows' sequences, and releases those that are in no row any more.

        vLLM does not say which request is in a row: it is the one whose tokens the row begins with.
        """
        unmatched = dict(enumerate(self._rows))
        result: list[RequestState | None] = [None] * len(rows)

        def take(row: int, index: int) -> None:
            if result[row] is not None or index not in unmatched:
                return
            tokens = unmatched[index].tokens
            if rows[row][: len(tokens)] == tokens:
                result[row] = unmatched.pop(index)

        for row in range(len(rows)):
            take(row, row)
        for row in range(len(rows)):
            for index in sorted(unmatched, key=lambda index: -len(unmatched[index].tokens)):
                take(row, index)
        for sequence in unmatched.values():
            sequence.num_computed_tokens = len(sequence.tokens)  # it has ended: drafters may learn from its output
            self.drafter.release(sequence)
        self._rows = [self._update(sequence, row, new) for sequence, row, new in zip(result, rows, sampled)]
        return self._rows

    def _update(self, sequence: RequestState | None, tokens: list[int], sampled: Sequence[int]) -> RequestState:
        """Gives a row's sequence its tokens; None: it is new."""
        if sequence is None:
            sequence = RequestState(next(self._ids), [], max(0, len(tokens) - len(sampled)), GREEDY, seed=0)
        if isinstance(self.drafter, TokenRecycling):
            self.drafter.follow(tokens[max(0, len(sequence.tokens) - 1) :])
        sequence.tokens = tokens
        return sequence


def first_branch(draft: Draft) -> list[int]:
    """The tokens along a draft's first trials, which its drafter prefers."""
    tokens: list[int] = []
    node = -1
    while len(draft) and draft.trials[node + 1]:
        node = draft.trials[node + 1][0].node
        tokens.append(draft.tokens[node])
    return tokens


def _build(
    options: Mapping[str, Any], budget: int, *, vocab_size: int, max_model_len: int, max_num_seqs: int, tokenizer: str
) -> Drafter[DrafterConfig]:
    """Builds the drafter of ``options``."""
    rest = dict(options)
    if (module := rest.pop("module", None)) is not None:
        importlib.import_module(module)
    if rest.get("num_speculative_tokens", budget) != budget:
        raise ConfigError(f"num_speculative_tokens is {budget} in vLLM's speculative_config: remove it from {KEY!r}")
    method = rest.pop("method", DEFAULT)
    kind = drafters[method]
    config = kind.config_class.from_dict(method, {**rest, "num_speculative_tokens": budget})
    if config.branches:
        raise ConfigError("vLLM takes chains only: remove 'tree' and 'tree_nodes'")
    needs = kind.needs
    if needs.hidden or needs.model or needs.grammar or "model" in {*vars(config)}:
        raise ConfigError(f"method {method!r} needs more than token ids, which is all that vLLM shows a proposer")
    info = SimpleNamespace(vocab_size=vocab_size, max_len=max_model_len, device="cpu", eos_ids=frozenset())
    context = DraftContext(
        target=SimpleNamespace(info=info),  # all that drafters of point masses need of it
        sampler=Sampler(vocab_size),
        rule=rules["coupled"](None),
        tokenizer=load_tokenizer(tokenizer),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    return kind.build(config, context)
