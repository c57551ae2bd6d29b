"""What a drafter is. To add one: a config class, ``propose``, and a name; see docs/add_a_drafter.md."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from safetensors import safe_open

from forerun import pretrained
from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.core.config import Within, check_types, check_within
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft, Drafts, Verdicts
from forerun.models.base import Model
from forerun.sampling.draw import Sampler, node_key, probabilities
from forerun.sampling.noise import DRAFT
from forerun.sampling.params import COLDEST, LARGEST
from forerun.sampling.warp import Row, warp
from forerun.speculate.names import drafters

if TYPE_CHECKING:
    from forerun.speculate.accept.base import Rule
    from forerun.speculate.verify import Verification

DEEPEST = 4096
"""Tokens of a draft, more than any forward verifies."""


@dataclass(frozen=True)
class DrafterConfig:
    """Options every drafter has; a drafter's own extend it. Field names are the keys of ``speculative_config``."""

    num_speculative_tokens: int = 3
    """Tokens drafted per round; with ``tree``, its depth."""
    tree: tuple[int, ...] | None = None
    """Children per node at each depth, e.g. (4, 2, 1, 1); None: a chain."""
    draft_temperature: float | None = None
    """Temperature of q where it should differ from the request's (lossless: q is what tokens are drawn from)."""

    limits: ClassVar[Mapping[str, Within]] = {
        "num_speculative_tokens": Within(least=1, most=DEEPEST, whole=True),
        "draft_temperature": Within(least=COLDEST, most=LARGEST),
    }
    """What numbers its own options may be, as ``check_within`` takes it."""
    without: ClassVar[Mapping[str, str]] = {}
    """Inherited options that it does not have, and why."""

    def __post_init__(self) -> None:
        for kind in type(self).__mro__:
            check_within(self, vars(kind).get("limits", {}))
            for name, why in vars(kind).get("without", {}).items():
                if getattr(self, name) is not None:
                    raise ConfigError(f"{why}: remove {name!r}")
        if self.tree is not None:
            shape = tuple(self.tree) if isinstance(self.tree, Sequence) else ()
            if not shape or any(not isinstance(w, int) or w < 1 for w in shape):
                raise ConfigError(f"tree must list how many children each depth has, e.g. [4, 2, 1], not {self.tree!r}")
            object.__setattr__(self, "tree", shape)
            object.__setattr__(self, "num_speculative_tokens", len(shape))

    @classmethod
    def from_dict(cls, method: str, options: dict[str, Any]) -> DrafterConfig:
        """Build from ``speculative_config`` keys; a key of another method is an error that names it."""
        known = {field.name for field in fields(cls)}
        for key in options:
            if key not in known:
                owners = [n for n in drafters if key in {f.name for f in fields(drafters[n].config_class)}]
                hint = f" (it belongs to {', '.join(owners)})" if owners else ""
                has = ", ".join(sorted(known))
                raise ConfigError(f"speculative_config: method {method!r} has no option {key!r}{hint}; it has {has}")
        check_types(cls, options)
        config = cls(**options)
        asked = options.get("num_speculative_tokens", config.num_speculative_tokens)
        if config.tree is not None and asked != config.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {asked}, but tree {list(config.tree)} is {len(config.tree)} deep: "
                "leave one of them out"
            )
        return config

    @classmethod
    def with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` of a ``speculative_config`` that says nothing of how far to draft, and what is best then; where
        that is longer drafts than pay always, with a length policy that finds out (``length``)."""
        return dict(options)

    def width(self, depth: int) -> int:
        """Children of a node at ``depth`` (the root has depth 0)."""
        return self.tree[depth] if self.tree is not None else 1

    @property
    def branches(self) -> bool:
        """Whether drafts may branch because an option asks for it."""
        return self.tree is not None

    def nodes_by_depth(self) -> list[int]:
        """Entry d: how many nodes a draft of depth d has at most."""
        totals, level = [0], 1
        for depth in range(self.num_speculative_tokens):
            level *= self.width(depth)
            totals.append(totals[-1] + level)
        return totals

    def max_nodes(self) -> int:
        """Most nodes a draft can have."""
        return self.nodes_by_depth()[-1]


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the target; the engine serves needs, never names."""

    hidden: tuple[int, ...] = ()
    """Layers whose outputs (of every committed token) it wants in ``Verdict.hidden``, counted as transformers'
    hidden states: 0 the embeddings, i the output of the i-th layer, the last one after the final norm."""
    model: bool = False
    """It calls the target's embedding, head or forward itself."""
    grammar: bool = False
    """It drafts only for requests with structured output."""
    rows: int = 0
    """Nodes that it reads into the target's cache at most before the target reads its draft."""


def common_tokens(tokenizer: Any) -> list[int]:
    """The commonest tokens of code and English, the commonest first, as ``lab/tools/common_tokens.py`` counted them;
    empty where no table is of ``tokenizer``. A table names a few tokens by which its tokenizer is known."""
    for path in pretrained.common_tokens() if tokenizer is not None else ():
        with safe_open(path, "pt") as file:
            known = {int(token): text for token, text in file.metadata().items() if token.isdigit()}
            if tokenizer.convert_ids_to_tokens(list(known)) == list(known.values()):
                return list(file.get_tensor("tokens").tolist())
    return []


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
    """Whether prefixes of committed tokens are shared between requests, in the drafter's pages too."""
    target_attention: Callable[[], Attention] | None = None
    """Attention over the target's cache, for drafters that run the target itself; there once the engine is built."""
    stream: int = 0
    """Which of several drafters of one tree this is: their draws must be independent where p meets q."""

    def require_decoder(self, method: str) -> None:
        """Raise ConfigError where the target is an encoder-decoder, for drafters that run or feed on its layers."""
        if self.target.info.encoder is not None:
            raise ConfigError(
                f"method {method!r} builds on a decoder's layers, and {self.target.info.name} is an encoder-decoder: "
                "use draft_model, ngram, prompt_lookup, suffix or table"
            )

    def commonest(self, size: int, known: int) -> torch.Tensor:
        """Tokens that are worth an output, int64 [size] ascending, of the first ``known`` of the vocabulary: special
        ones, then those of the tokenizer's table, then the first others, which in BPE are the commonest."""
        special = {*self.target.info.eos_ids, *(self.tokenizer.added_tokens_decoder if self.tokenizer else ())}
        ranked = dict.fromkeys([*sorted(special), *common_tokens(self.tokenizer), *range(known)])
        return torch.tensor(sorted([token for token in ranked if token < known][:size]))

    def attention(self) -> Attention:
        if self.target_attention is None:
            raise ConfigError("this drafter runs the target itself and needs an engine around it")
        return self.target_attention()


C = TypeVar("C", bound=DrafterConfig)


class Drafter(ABC, Generic[C]):
    """Proposes drafts for a batch of sequences. Source: Leviathan et al. 2023, algorithm 1, where it samples from q.

    ``propose`` first feeds itself whatever committed tokens it has not seen (``sequence.tokens[self.length:]``):
    first prefill, full acceptance, a round without a draft and preemption are then one case. A sequence may get
    an empty draft; it then decodes plainly.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    needs: Needs = Needs()
    watches: ClassVar[bool] = True
    """Rounds in which it was asked for nothing concern it, too: ``observe`` sees them."""
    parts: Sequence[Drafter] = ()
    """Drafters inside of it."""
    per_sequence: ClassVar[tuple[str, ...]] = ()
    """Names of what it keeps of sequences, mappings by their ids: a fork has a copy, and who is released has none."""

    def __init__(self, config: C, context: DraftContext) -> None:
        self.config = config
        self.context = context
        for name in self.per_sequence:
            setattr(self, name, {})

    @classmethod
    def build(cls, config: C, context: DraftContext) -> Drafter[C]:
        """The drafter that ``config`` asks for; a subclass where options choose one."""
        return cls(config, context)

    @abstractmethod
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        """Guess what comes next.

        Args:
            sequences: requests that decode this round and chose this drafter.
            budgets: for each, how many tokens deep its draft may be, at least 1.

        Returns:
            One draft per sequence, in their order; an empty one decodes plainly. Where the rule ``needs_q``,
            ``Draft.q`` is float32 [rows, vocabulary] and holds the very distributions that the trials were drawn from.
        """

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """See what became of a round: after every round, prefill included, or, unless it ``watches``, after those in
        which it was asked for drafts. A drafter with a cache truncates it here.

        Args:
            sequences: all of this drafter's in the round. Their tokens are already extended.
            drafts: what ``propose`` gave for each; empty where it was not asked.
            verdicts: for each, the accepted path and the emitted tokens, and in ``hidden`` what the drafter ``needs``.
            result: the whole round, with the target's scores.
        """

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """A beam is continued twice. What is known of ``source`` may be shared; without it, its text is read again.

        Args:
            source: a known sequence, as it was before this round's draft was judged; ``observe`` sees both.
            sequence: new here, with the same tokens.
        """
        for kept in (getattr(self, name) for name in self.per_sequence):
            if source.id in kept:
                kept[sequence.id] = copy.deepcopy(kept[source.id])

    def release(self, sequence: RequestState) -> None:
        """Forget a sequence: it ended, or was preempted."""
        for name in self.per_sequence:
            getattr(self, name).pop(sequence.id, None)

    def close(self) -> None:
        """The engine ends, or is asked to: write down what is to be kept."""
        for part in self.parts:
            part.close()

    def rewind(self, sequence: RequestState) -> None:
        """Tokens that were ``tentative`` have been taken back: keep no state beyond ``sequence.tokens``."""
        self.release(sequence)

    def pools(self) -> list[Pool]:
        """Its own KV pools, which share the engine's memory budget. A full pool fails nobody: a drafter proposes
        nothing for a sequence that it has no pages for."""
        return [pool for part in self.parts for pool in part.pools()]

    def models(self) -> list[Model]:
        """The models of its own that it runs."""
        return [model for part in self.parts for model in part.models()]

    def reusable(self, sequence: RequestState) -> int:
        """How many of a new sequence's tokens the target may take from its prefix cache: 0 for a drafter that feeds on
        hidden states of every token, unless it has kept them."""
        return 0 if self.needs.hidden else len(sequence.tokens)

    def backlog(self, sequence: RequestState) -> int:
        """How many committed tokens it would have to read, at a price, before it can draft for this sequence."""
        return 0

    def cached_tokens(self, sequence: RequestState) -> list[int] | None:
        """The tokens this drafter has state for; None if it keeps none. Always a prefix of the committed ones."""
        return None

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        """``speculative_config`` keys of a small working instance for the checkpoint in ``target``; the conformance
        tests build every registered drafter from them. One that needs trained weights writes random ones to
        ``folder`` and names them here."""
        return {}


def spread(logits: torch.Tensor, ids: torch.Tensor, size: int) -> torch.Tensor:
    """Logits [n, ``size``] of those [n, len(ids)] of the tokens ``ids`` int64 alone; others are impossible."""
    return logits.new_full((len(logits), size), float("-inf")).index_copy_(1, ids, logits)


class Chooser:
    """Draws children from a drafter's logits in the way the acceptance rule needs.

    Under ``coupled``: the top-k of log q + g with the target's own noise. Under rules that compare p and q: draws
    of q with noise of their own, and the exact q rows are kept. Greedy requests: the top-k of log q, point masses.
    """

    def __init__(self, sampler: Sampler, rule: Rule, temperature: float | None = None, stream: int = 0) -> None:
        self.sampler = sampler
        self.rule = rule
        self.temperature = temperature
        self.purpose = DRAFT + (stream << 8)

    def row(self, sequence: RequestState, path: Sequence[int] = ()) -> Row:
        return Row(sequence, path, self.temperature)

    def align(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut or pad logits to the target's vocabulary; ids the drafter lacks get probability 0."""
        size = self.sampler.vocab_size
        if logits.shape[1] > size:
            return logits[:, :size]
        if logits.shape[1] < size:
            return torch.nn.functional.pad(logits, (0, size - logits.shape[1]), value=float("-inf"))
        return logits

    def choose(
        self, logits: torch.Tensor, rows: Sequence[Row], parents: Sequence[int], width: int = 1
    ) -> tuple[list[list[int]], torch.Tensor | None, list[int]]:
        """Children of each row, in trial order: ids, q [rows, vocabulary] (None if no row needs it), and each row's
        row of q (a point mass for greedy requests)."""
        warped = warp(self.align(logits), rows)
        hot = any(row.effective_temperature > 0.0 for row in rows)
        q_rows = [i if row.effective_temperature > 0.0 else POINT_MASS for i, row in enumerate(rows)]
        shared = not self.rule.needs_q or not hot
        if shared and width == 1:
            values, tokens, q = self.sampler.sample(warped, rows, distribution=hot)
            return [[t] if value > float("-inf") else [] for value, t in zip(values, tokens)], q, q_rows
        if shared:
            q = probabilities(warped) if hot else None
            return self.sampler.rank(self.sampler.couple(warped, rows), width)[0], q, q_rows
        q, tops, greedy = self.sampler.distribution(warped)
        roots = [len(row.sequence.tokens) for row in rows]

        def keys(trial: int) -> list[int]:
            return [node_key(self.purpose, row, root, node, trial) for row, root, node in zip(rows, roots, parents)]

        if width > 1 and not self.rule.replacement:
            noisy = [key if row.effective_temperature > 0.0 else None for key, row in zip(keys(0), rows)]
            return self.sampler.rank(self.sampler.perturb(warped, noisy), width)[0], q, q_rows
        draws = [self.sampler.draw(q, keys(trial)).tolist() for trial in range(width)]
        cold = any(row.effective_temperature == 0.0 for row in rows) and width > 1
        top = self.sampler.rank(warped, width)[0] if cold else [[token] for token in greedy]
        ids = [[d[i] for d in draws] if row.effective_temperature > 0.0 else top[i] for i, row in enumerate(rows)]
        return [each if value > float("-inf") else [] for each, value in zip(ids, tops)], q, q_rows

    def rank(self, logits: torch.Tensor, rows: Sequence[Row], count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The best ``count`` ids of each row, best first, and the log-probabilities to rank paths by.

        Under ``coupled`` the target's own noise is part of the score; under other rules nothing random is, so that
        the candidates are point masses which no draw has influenced.
        """
        scores = warp(self.align(logits), rows)
        if not self.rule.needs_q:
            scores = self.sampler.couple(scores, rows)
        return self.sampler.rank(scores, count)
