"""A draft is a tree of guessed tokens (SpecInfer's token tree, arXiv 2305.09781); a verdict says which path is kept."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from forerun.core.batch import HiddenStates
    from forerun.kernels.gpu import HostCopy

POINT_MASS = -1


class Trial(NamedTuple):
    """One draw under a parent: the node that holds its token, and the row of ``Draft.q`` it was drawn from."""

    node: int
    q_row: int = POINT_MASS


def depths(parents: Sequence[int]) -> list[int]:
    """How many nodes are above each node of a tree, given its ``parents`` (-1: the root)."""
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def node_paths(parents: Sequence[int]) -> list[list[int]]:
    """For each node of a tree, its ancestors and itself, from the root down."""
    result: list[list[int]] = []
    for node, parent in enumerate(parents):
        result.append([*(result[parent] if parent >= 0 else ()), node])
    return result


class Shadow(NamedTuple):
    """A looked-up token that is compared with what the target emits instead of being verified."""

    method: str
    depth: int
    """Tokens before it, all of them drafted."""
    token: int
    evidence: int


LENGTHS, FREQUENCIES = (1, 2, 4, 8, 16), (0.35, 0.75)


def evidence(matched: int, frequency: float) -> int:
    """The kind of a looked-up token: how many tokens before it ``matched``, and how often it followed them."""
    return (len(FREQUENCIES) + 1) * bisect_left(LENGTHS, matched) + bisect_right(FREQUENCIES, frequency)


@dataclass(slots=True)
class Draft:
    """A tree of proposed tokens whose root is the last committed token.

    Node i holds ``tokens[i]`` (vLLM's ``draft_token_ids``); its parent ``parents[i]`` is an earlier node, or -1 for the
    root. Two nodes never have the same path, but every draw is kept: ``trials[parent + 1]`` lists the draws under a
    parent, in the order drawn. Recursive rejection is biased where repeated draws of one token collapse into one
    (SpecInfer, arXiv 2305.09781). ``q`` [rows, vocabulary] holds the probabilities that trials were drawn from, and may
    be shared with other drafts of the round. A trial without a row of q is a point mass.
    """

    ids: list[int] = field(default_factory=list)
    """``tokens``, or -1 - i for the i-th number of ``late``."""
    parents: list[int] = field(default_factory=list)
    trials: list[list[Trial]] = field(default_factory=list)
    q: torch.Tensor | None = None
    method: str | None = None
    confidence: float | None = None
    """The drafter's confidence from 0 to 1, before it drew anything; None: it cannot say."""
    evidence: list[int] = field(default_factory=list)
    """For each token of a looked-up chain, the kind of match that it comes from (``evidence``)."""
    shadow: Shadow | None = None
    """A looked-up token that is not verified, from which the length policy learns all the same."""
    late: HostCopy | None = field(default=None, repr=False)
    """Drafted tokens that only the GPU knows so far."""

    @property
    def tokens(self) -> list[int]:
        """Waits for those that are still on a GPU."""
        if self.late is not None:
            self.settle()
        return self.ids

    def settle(self) -> None:
        """Waits for tokens that are still on a GPU."""
        if self.late is not None:
            found, self.late = self.late.read().tolist(), None
            self.ids = [found[-1 - each] if each < 0 else each for each in self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def chain(cls, tokens: Sequence[int], q: torch.Tensor | None = None, rows: Sequence[int] | None = None) -> Draft:
        """A single branch. ``rows[i]`` is the row of ``q`` that token i was drawn from (None: point masses)."""
        count = len(tokens)
        rows = rows if rows is not None else [POINT_MASS] * count
        trials = [[Trial(i, rows[i])] for i in range(count)]
        trials.append([])
        return cls(list(tokens), list(range(-1, count - 1)), trials, q)

    @classmethod
    def late_chain(cls, late: HostCopy, entries: Sequence[int]) -> Draft:
        """A chain of these entries of ``late``."""
        draft = cls.chain([-1 - entry for entry in entries])
        draft.late = late
        return draft

    @classmethod
    def tree(cls, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        """A tree of point masses. Siblings must carry different tokens."""
        draft = cls()
        for token, parent in zip(tokens, parents, strict=True):
            draft.add(token, parent)
        if len(draft) != len(tokens):
            raise ValueError("two siblings carry the same token")
        return draft

    def cut(self, count: int) -> Draft:
        """The first ``count`` tokens of a looked-up chain; the next one is its ``shadow``."""
        if count >= len(self.tokens):
            return self
        draft = Draft.chain(self.tokens[:count])
        draft.method, draft.confidence, draft.evidence = self.method, self.confidence, self.evidence[:count]
        draft.shadow = Shadow(self.method or "", count, self.tokens[count], self.evidence[count])
        return draft

    def add(self, token: int, parent: int = -1, row: int = POINT_MASS) -> int:
        """Records a draw of ``token`` under ``parent``. Returns its node, which may exist already."""
        if not self.trials:
            self.trials.append([])
        node = self.child(parent, token)
        if node is None:
            node = len(self.ids)
            self.ids.append(token)
            self.parents.append(parent)
            self.trials.append([])
        self.trials[parent + 1].append(Trial(node, row))
        return node

    def check(self) -> set[int]:
        """The rows of ``q`` that its trials were drawn from. Raises ValueError if it is not a tree, or lacks its q."""
        count = len(self.ids)
        if {*map(type, self.ids)} != {int} and not all(isinstance(token, Integral) for token in self.ids):
            raise ValueError("drafted tokens must be integers")
        if len(self.parents) != count or len(self.trials) != count + 1:
            raise ValueError(f"{len(self.parents)} parents and {len(self.trials)} lists of trials for {count} nodes")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("the parent of a node must be an earlier node, or -1")
        rows, seen = set[int](), set[int]()
        for parent, trials in enumerate(self.trials, -1):
            for node, row in trials:
                if not 0 <= node < count or self.parents[node] != parent:
                    raise ValueError(f"trials of node {parent} name node {node}, which is not its child")
                seen.add(node)
                rows.add(row)
        if len(seen) < count:
            raise ValueError("each node must be a trial of its parent: use Draft.add or Draft.chain")
        rows.discard(POINT_MASS)
        if rows and self.q is None:
            raise ValueError("trials name rows of q, and there is no q")
        return rows

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        return len(self.ids) if self.is_chain else max(self.depths())

    def child(self, parent: int, token: int) -> int | None:
        """The parent's child that carries ``token``."""
        trials = self.trials[parent + 1] if self.trials else ()
        return next((node for node, _ in trials if self.tokens[node] == token), None)

    def children(self, parent: int) -> dict[int, int]:
        """Token -> node of the parent's children."""
        return {self.tokens[trial.node]: trial.node for trial in self.trials[parent + 1]} if self.trials else {}

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[i] for i in self.path(node)]

    def depths(self) -> list[int]:
        """Depth of every node; the root's children have depth 1."""
        return [1 + depth for depth in depths(self.parents)]


@dataclass(slots=True)
class Verdict:
    """What became of one sequence's draft in a round.

    An acceptance rule or a beam search decides the first five fields; the round adds the others.
    """

    path: list[int] = field(default_factory=list)
    """The accepted nodes, from the root down."""
    token: int | None = None
    """The token that follows the path; None: the sequence only read its prompt."""
    error: str | None = None
    """What is wrong with the logits after the path; None: nothing."""
    tested: int = 0
    """Drafted positions whose drafted prefix was accepted, the first rejected one included."""
    overlap: float = 0.0
    """The sum of sum_x min(p, q) over tested positions (Leviathan et al. 2023, corollary 3.6); point masses: p(x)."""
    tokens: list[int] = field(default_factory=list)
    """The tokens to emit: the path's, then ``token``; fewer if a stop or an error is among them."""
    fed: int = 0
    """Committed tokens that the target read this round: 1 in plain decoding, more in prefill."""
    hidden: HiddenStates | None = None
    """If a drafter needs them: ``hidden[layer]`` [tokens, hidden size] of every token that stays in the cache."""

    @property
    def matched(self) -> int:
        """How many of the tested positions were accepted."""
        return len(self.path)

    @property
    def accepted(self) -> int:
        """How many of the emitted ``tokens`` were drafted."""
        return min(len(self.tokens), len(self.path))

    def decided_tokens(self, draft: Draft) -> list[int]:
        """The path's tokens and the one that follows, before any stop is looked for."""
        tokens = [draft.tokens[node] for node in self.path]
        return tokens if self.error is not None or self.token is None else [*tokens, self.token]


Drafts = Sequence[Draft]
Verdicts = Sequence[Verdict]
"""One for each sequence of a round, as ``Drafts``."""
