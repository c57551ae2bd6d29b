"""The interface of a drafter. A new one needs a config class, ``propose`` and a name: see docs/add_a_drafter.md."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.core.config import Within, check_types, check_within
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft, Drafts, Verdicts
from forerun.models.run.base import Model
from forerun.sampling.draw import Sampler, node_key, probabilities
from forerun.sampling.noise import DRAFT
from forerun.sampling.params import COLDEST, LARGEST
from forerun.sampling.warp import Row, warp
from forerun.speculate.accept.base import Rule
from forerun.speculate.draft.memory import Memory
from forerun.speculate.length.base import Parts
from forerun.speculate.names import drafters as drafters  # for drafters of other packages
from forerun.speculate.verify import Verification

MAX_DEPTH = 4096
"""Upper bound of ``num_speculative_tokens``: more than any forward verifies."""


@dataclass(frozen=True)
class DrafterConfig:
    """Options of every drafter; subclasses add their own. Field names are the keys of ``speculative_config``."""

    num_speculative_tokens: int = 3
    """Tokens drafted per round; with ``tree``, its depth."""
    tree: tuple[int, ...] | None = None
    """Children per node at each depth, e.g. (4, 2, 1, 1); None: a chain."""
    draft_temperature: float | None = None
    """Temperature of q where it should differ from the request's (lossless: q is what tokens are drawn from)."""

    limits: ClassVar[Mapping[str, Within]] = {
        "num_speculative_tokens": Within(least=1, most=MAX_DEPTH, whole=True),
        "draft_temperature": Within(least=COLDEST, most=LARGEST),
    }
    """Permitted ranges of this class's numeric options."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Inherited options that this drafter does not have, and the reason that the error gives."""

    def __post_init__(self) -> None:
        for cls in type(self).__mro__:
            check_within(self, vars(cls).get("limits", {}))
            for name, reason in vars(cls).get("unsupported", {}).items():
                if getattr(self, name) is not None:
                    raise ConfigError(f"{reason}: remove {name!r}")
        if self.tree is not None:
            shape = tuple(self.tree) if isinstance(self.tree, Sequence) else ()
            if not shape or any(not isinstance(w, int) or w < 1 for w in shape):
                raise ConfigError(f"tree must list how many children each depth has, e.g. [4, 2, 1], not {self.tree!r}")
            object.__setattr__(self, "tree", shape)
            object.__setattr__(self, "num_speculative_tokens", len(shape))

    @classmethod
    def from_dict(cls, method: str, options: dict[str, Any]) -> DrafterConfig:
        """Builds the config from ``speculative_config`` keys. Raises ConfigError for a key of another method."""
        names = {field.name for field in fields(cls)}
        for key in options:
            if key not in names:
                owners = [n for n in drafters.loadable() if key in {f.name for f in fields(drafters[n].config_class)}]
                hint = f" (it belongs to {', '.join(owners)})" if owners else ""
                has = ", ".join(sorted(names))
                raise ConfigError(f"speculative_config: method {method!r} has no option {key!r}{hint}; it has {has}")
        check_types(cls, options)
        config = cls(**options)
        requested = options.get("num_speculative_tokens", config.num_speculative_tokens)
        if config.tree is not None and requested != config.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {requested}, but tree {list(config.tree)} is {len(config.tree)} deep: "
                "remove one"
            )
        return config

    @classmethod
    def with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``options`` with the best defaults added where they do not say how far to draft. These may include a
        length policy (``length``), which shortens drafts that do not pay."""
        return dict(options)

    def width(self, depth: int) -> int:
        """Children of a node at ``depth``; the root has depth 0."""
        return self.tree[depth] if self.tree is not None else 1

    @property
    def branches(self) -> bool:
        """Whether an option asks for trees."""
        return self.tree is not None

    def nodes_by_depth(self) -> list[int]:
        """Entry d is the most nodes that a draft of depth d has."""
        totals, level = [0], 1
        for depth in range(self.num_speculative_tokens):
            level *= self.width(depth)
            totals.append(totals[-1] + level)
        return totals

    def max_nodes(self) -> int:
        """The most nodes that a draft can have."""
        return self.nodes_by_depth()[-1]


@dataclass(frozen=True)
class Needs:
    """What a drafter needs from the target. The engine provides it without knowing which drafter asks."""

    hidden: tuple[int, ...] = ()
    """Hidden states of every committed token to put in ``Verdict.hidden``, by transformers' indices: 0 the embeddings,
    i the output of the i-th layer, the last one after the final norm. Tokens from the prefix cache have none."""
    model: bool = False
    """It calls the target's embedding, output layer or forward itself."""
    grammar: bool = False
    """It drafts only for requests with structured output."""
    rows: int = 0
    """Most draft nodes that it writes to the target's KV cache before verification."""


@dataclass
class DraftContext:
    """What the engine gives a drafter when it is built."""

    target: Model
    sampler: Sampler
    rule: Rule
    tokenizer: Any
    max_num_seqs: int
    max_model_len: int
    dtype: str = "auto"
    options: dict[str, Any] | None = None
    """Engine options that apply to a draft model too (``weights``, ``page_size``, ...)."""
    prefix_caching: bool = False
    """Whether requests share cached prefixes, in the drafter's own pages too."""
    target_attention: Callable[[], Attention] | None = None
    """For drafters that run the target: returns attention over its cache, once the engine is built."""
    memory: Memory | None = None
    """Answers of earlier processes."""
    stream: int = 0
    """Index of this drafter among those that draft one tree. It selects independent noise, which rules that compare p
    and q need."""

    def require_decoder(self, method: str) -> None:
        """Raises ConfigError if the target is an encoder-decoder, for drafters that use a decoder's layers."""
        if self.target.info.encoder is not None:
            raise ConfigError(
                f"method {method!r} does not support encoder-decoders such as {self.target.info.name}: use "
                "draft_model, ngram, prompt_lookup, suffix or table"
            )

    def attention(self) -> Attention:
        """Returns attention over the target's cache. Raises ConfigError without an engine."""
        if self.target_attention is None:
            raise ConfigError("this drafter runs the target itself and needs an engine around it")
        return self.target_attention()


C = TypeVar("C", bound=DrafterConfig)


class Drafter(ABC, Generic[C]):
    """Proposes drafts for a batch of sequences. Source: Leviathan et al. 2023, algorithm 1, where it samples from q.

    ``propose`` must first read the committed tokens that it has not seen; a drafter counts those itself. Prefill,
    full acceptance, a round without a draft and preemption are then one case. A sequence with an empty draft decodes
    plainly.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    needs: Needs = Needs()
    has_evidence: bool = False
    """Whether a draft costs next to nothing and carries its ``evidence``."""
    watches: ClassVar[bool] = True
    """Whether ``observe`` is called after every round; False: only after rounds with a call of ``propose``."""
    looks_up: bool = False
    """Whether it drafts from the request's own text, ``RequestState.lookup`` included."""
    can_skip: bool = False
    """Whether it may begin with the last tokens of a text (``RequestState.reads``); False: it reads all or waits."""
    inner: Sequence[Drafter[Any]] = ()
    """Drafters that this one is made of."""
    per_sequence: ClassVar[tuple[str, ...]] = ()
    """Attributes that map sequence ids to state. They are made empty, copied for forks and cleared on release."""

    def __init__(self, config: C, context: DraftContext) -> None:
        self.config = config
        self.context = context
        for name in self.per_sequence:
            setattr(self, name, {})

    @classmethod
    def build(cls, config: C, context: DraftContext) -> Drafter[C]:
        """Returns the drafter for ``config``. Override it where options choose between classes."""
        return cls(config, context)

    @abstractmethod
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        """Drafts the next tokens of each sequence.

        Args:
            sequences: requests that decode this round and chose this drafter.
            budgets: the greatest depth of each sequence's draft, at least 1.

        Returns:
            One draft per sequence, in the same order. If the rule ``needs_q``, ``Draft.q`` float32 [rows, vocabulary]
            holds the exact distributions that the tokens were drawn from.
        """

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Called after a round, prefill included (see ``watches``). A drafter with a cache truncates it here.

        Args:
            sequences: all sequences of this drafter in the round, already extended by the new tokens.
            drafts: what ``propose`` returned for each; empty where it was not asked.
            verdicts: for each, the accepted path, the emitted tokens, and in ``hidden`` the states it ``needs``.
            result: the whole round, with the target's scores.
        """

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """Called when a beam search continues one beam twice. Without a copy of the state, the new beam is read anew.

        Args:
            source: an existing sequence, before this round's verdict; ``observe`` sees both.
            sequence: a new sequence with the same tokens.
        """
        for state in (getattr(self, name) for name in self.per_sequence):
            if source.id in state:
                state[sequence.id] = copy.deepcopy(state[source.id])
        for pool in self.pools():
            if source.id in pool.block_tables:
                pool.fork(source.id, sequence.id, pool.length(source.id))

    def release(self, sequence: RequestState) -> None:
        """Forgets a sequence that ended or was preempted."""
        for name in self.per_sequence:
            getattr(self, name).pop(sequence.id, None)
        for pool in self.pools():
            pool.free(sequence.id)

    def rewind(self, sequence: RequestState) -> None:
        """``tentative`` tokens were taken back: drops all state beyond ``sequence.tokens``."""
        self.release(sequence)

    def parts(self) -> Parts:
        """The methods that it is made of, for the length policy."""
        return Parts((self.name,), None) if self.has_evidence else Parts((), self.name)

    def close(self) -> None:
        """The engine ends: writes what is to be kept."""
        for drafter in self.inner:
            drafter.close()

    def pools(self) -> list[Pool]:
        """Its own KV pools, which share the engine's memory budget. If a pool has no pages left for a sequence, the
        drafter must propose nothing for it."""
        return [pool for drafter in self.inner for pool in drafter.pools()]

    def models(self) -> list[Model]:
        """Its own models."""
        return [model for drafter in self.inner for model in drafter.models()]

    def backlog(self, sequence: RequestState) -> int:
        """How many committed tokens it must prefill, at a cost, before it can draft for this sequence."""
        return 0

    def cached_tokens(self, sequence: RequestState) -> list[int] | None:
        """The prefix of the committed tokens that it has state for; None if it keeps no state. For tests."""
        return None

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        """``speculative_config`` keys of a small instance for the checkpoint ``target``, for the conformance tests. A
        drafter with trained weights writes random ones to ``folder`` and names them here."""
        return {}


def scatter_logits(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [n, vocab_size] from ``logits`` [n, len(ids)] of the tokens ``ids`` int64; -inf for all others."""
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, ids, logits)


class Chooser:
    """Draws children from a drafter's logits as the acceptance rule requires.

    - Greedy requests: the top-k of log q, as point masses.
    - Rule ``coupled``: the top-k of log q + g, where g is the Gumbel noise that the target samples with.
    - Rules that compare p and q: draws from q with independent noise, together with the exact rows of q.
    """

    def __init__(self, sampler: Sampler, rule: Rule, temperature: float | None = None, stream: int = 0) -> None:
        self.sampler = sampler
        self.rule = rule
        self.temperature = temperature
        self.purpose = DRAFT + (stream << 8)

    @classmethod
    def of(cls, config: DrafterConfig, context: DraftContext) -> Chooser:
        return cls(context.sampler, context.rule, config.draft_temperature, context.stream)

    def row(self, sequence: RequestState, path: Sequence[int] = ()) -> Row:
        return Row(sequence, path, self.temperature)

    def align(self, logits: torch.Tensor) -> torch.Tensor:
        """Cuts or pads logits to the target's vocabulary; ids that the drafter lacks get -inf."""
        size = self.sampler.vocab_size
        if logits.shape[1] > size:
            return logits[:, :size]
        if logits.shape[1] < size:
            return torch.nn.functional.pad(logits, (0, size - logits.shape[1]), value=float("-inf"))
        return logits

    def choose(
        self, logits: torch.Tensor, rows: Sequence[Row], parents: Sequence[int], width: int = 1
    ) -> tuple[list[list[int]], torch.Tensor | None, list[int]]:
        """Draws ``width`` children for each row.

        Returns:
            Each row's token ids in trial order; q [rows, vocabulary], None if no row samples; and each row's index into
            q (``POINT_MASS`` for greedy requests).
        """
        warped = warp(self.align(logits), rows)
        samples = [row.effective_temperature > 0.0 for row in rows]
        q_rows = [i if sampled else POINT_MASS for i, sampled in enumerate(samples)]
        coupled = not self.rule.needs_q or not any(samples)  # tokens follow from the keyed noise, not from draws
        if coupled and width == 1:
            values, tokens, q = self.sampler.sample(warped, rows, distribution=any(samples))
            return [[t] if value > float("-inf") else [] for value, t in zip(values, tokens)], q, q_rows
        if coupled:
            q = probabilities(warped) if any(samples) else None
            return self.sampler.rank(self.sampler.couple(warped, rows), width)[0], q, q_rows
        q, tops, greedy = self.sampler.distribution(warped)
        roots = [len(row.sequence.tokens) for row in rows]

        def keys(trial: int) -> list[int]:
            return [node_key(self.purpose, row, root, node, trial) for row, root, node in zip(rows, roots, parents)]

        if width > 1 and not self.rule.replacement:
            noisy = [key if sampled else None for key, sampled in zip(keys(0), samples)]
            return self.sampler.rank(self.sampler.perturb(warped, noisy), width)[0], q, q_rows
        draws = [self.sampler.draw(q, keys(trial)).tolist() for trial in range(width)]
        ranked = width > 1 and not all(samples)
        top = self.sampler.rank(warped, width)[0] if ranked else [[token] for token in greedy]
        ids = [[draw[i] for draw in draws] if sampled else top[i] for i, sampled in enumerate(samples)]
        return [each if value > float("-inf") else [] for each, value in zip(ids, tops)], q, q_rows

    def rank(self, logits: torch.Tensor, rows: Sequence[Row], count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The ``count`` best ids of each row, best first, and the log-probabilities that rank paths.

        Under ``coupled`` the score includes the target's own noise. Under other rules it has no noise, so that
        candidates are point masses which no draw has influenced.
        """
        scores = warp(self.align(logits), rows)
        if not self.rule.needs_q:
            scores = self.sampler.couple(scores, rows)
        return self.sampler.rank(scores, count)
