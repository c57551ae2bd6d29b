"""``dflash``: a block of tokens predicted in one pass: DFlash (arXiv 2602.06036), DFlash2, DSpark and Domino.

The block's rows are the last committed token and mask tokens after it. In every layer they attend to each other, and to
keys and values projected from the target's hidden states of the whole text. Row i predicts the token at its own
position or, if the file says that it samples from its anchor, the next one.

DFlash2 adds convolutions over two rows around attention and feed-forward, and a selector, which rescores a row's 16
likeliest tokens by the previously drafted token. DSpark adds a bigram score of every token, the product of two
matrices, and a confidence head. Domino (arXiv 2605.29707) adds scores of every token from the row's state and that of a
GRU, which reads the tokens before the predicted one. In all of them, the exact q of each draw is known, so that rules
that compare p and q stay lossless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.core.request import Requests
from forerun.core.tree import Draft, Drafts
from forerun.models.architectures.drafters import dflash, head_config
from forerun.models.architectures.spec import Spec
from forerun.models.run.parts import BlockConvolution
from forerun.models.weights.published import read_dflash
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.chain import FEEDS_NORMED, can_chain
from forerun.speculate.draft.heads.head import FeedForward, Head, Norm, Sizes
from forerun.speculate.draft.heads.layers import HeadLayerDrafter, LayerConfig
from forerun.speculate.draft.levels import Frontier, grow

DEFAULTS: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "width": 16, "inner_size": 64, "blocks": 1, "theta": 10000.0, "eps": 1e-6, "mask": 0,
    "from_anchor": False, "windows": None, "causal": None, "group": None, "selector": None, "markov": None,
    "confidence": None, "biased": False, "domino": None,
}  # fmt: skip


class Convolution(nn.Module):
    """Weights of ``parts.BlockConvolution``, each shared by ``group`` channels."""

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, BlockConvolution.TAPS, size))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(size, 2 * BlockConvolution.TAPS * (size // group), bias=False)


class DFlashBlock(nn.Module):
    """Weights of one layer: attention over context and block, then a feed-forward layer."""

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        eps, group, biased = options["eps"], options["group"], options["biased"]
        self.heads, self.kv_heads, self.width = options["heads"], options["kv_heads"], options["width"]
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=biased)
        self.k_proj = nn.Linear(size, self.kv_heads * self.width, bias=biased)
        self.v_proj = nn.Linear(size, self.kv_heads * self.width, bias=biased)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=biased)
        self.q_norm, self.k_norm = Norm(self.width, eps), Norm(self.width, eps)
        self.mlp = FeedForward(size, options["inner_size"])
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.attention_conv, self.mlp_conv = (None if group is None else Convolution(size, group) for _ in range(2))


class Selector(nn.Module):
    """Scores candidates by (predecessor's code * projected hidden state) . candidate's code."""

    def __init__(self, size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.1)
        self.successor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.1)

    def forward(self, previous: torch.Tensor, states: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Scores [n, candidates], for the ``previous`` tokens int64 [n] and states [n, hidden size]."""
        query = self.predecessor_codebook[previous] * self.hidden_projection(states)
        return (query[:, None] * self.successor_codebook[candidates]).sum(-1)


class Domino(nn.Module):
    """Scores of all tokens by [row's state, state of a GRU over the block's tokens so far], for all but the ``first``
    predicted tokens. ``options``: the widths of the GRU (``state``) and between the projections (``inner``)."""

    def __init__(self, size: int, vocabulary: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.first = options["first"]
        self.gru = nn.GRUCell(size, options["state"], bias=False)
        self.enter = nn.Linear(size + options["state"], options["inner"], bias=False)
        self.leave = nn.Linear(options["inner"], vocabulary, bias=False)

    def forward(self, states: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Scores [n, vocabulary] of states [n, hidden size] and the GRU's [n, state]."""
        return self.leave(F.silu(self.enter(torch.cat([states, memory], dim=-1))))


class DFlashHead(Head):
    """Options: sizes, ``layers`` (hidden states read), ``mask`` (the mask token), ``from_anchor``, ``windows`` and
    ``causal`` per layer, ``group`` of the convolutions, ``selector`` (rank, top), ``markov`` (rank), ``confidence``
    (``markov`` if that head also reads the Markov code), ``domino`` (state, inner, first), ``own_head``,
    ``draft_vocab_size``."""

    method = "dflash"
    quantizes = True
    read_public = staticmethod(read_dflash)
    feeds = FEEDS_NORMED
    block_class: ClassVar[type[DFlashBlock]] = DFlashBlock
    options_known = frozenset(DEFAULTS) | {"layers", "own_head", "draft_vocab_size"}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = o = {**DEFAULTS, **sizes.options}
        size = sizes.hidden_size
        self.fc = nn.Linear(len(self.layers) * size, size, bias=False)
        self.hidden_norm, self.norm = Norm(size, o["eps"]), Norm(size, o["eps"])
        self.blocks = nn.ModuleList(self.block_class(size, o) for _ in range(o["blocks"]))
        selector, rank = o["selector"], o["markov"]
        self.candidate_selector = None if selector is None else Selector(size, sizes.vocab_size, selector["rank"])
        self.make_lm_head(bool(o.get("own_head")))
        own_vocabulary = o.get("draft_vocab_size") or sizes.vocab_size
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank) if rank else None
        self.markov_w2 = nn.Linear(rank, own_vocabulary, bias=False) if rank else None
        self.domino = None if o["domino"] is None else Domino(size, own_vocabulary, o["domino"])
        inputs = size + (rank if o["confidence"] == "markov" else 0)
        self.confidence = nn.Linear(inputs, 1) if o["confidence"] else None

    def default_layers(self, last: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    @property
    def block_size(self) -> int:
        """Rows of a block; the last ``sizes.depth`` of them predict tokens."""
        return self.sizes.depth + (0 if self.options["from_anchor"] else 1)

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """What blocks attend to, [..., hidden size], of the target's hidden states [..., layers * hidden size]."""
        return self.hidden_norm(self.fc(hidden))

    def described(self) -> tuple[Any, Spec, dict[str, torch.Tensor]]:
        """Config, spec and weights of the layers, the final norm, and the output layer if it has its own."""
        config, kept = head_config(self.sizes, self.options), ("blocks.", "norm.", "lm_head.")
        tensors = {name: each.detach() for name, each in self.named_parameters() if name.startswith(kept)}
        return config, dflash(config, self.block_size, self.options), tensors

    def condition(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Makes logits [n, own vocabulary] depend on the ``previous`` tokens int64 [n], if the head does that."""
        if self.markov_w1 is None:
            return logits
        assert self.markov_w2 is not None
        return logits + self.markov_w2(self.markov_w1(previous)).float()

    def log_confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Log of the probability that each row's token is accepted if those before it are. States [n, hidden size]."""
        assert self.confidence is not None
        if self.options["confidence"] == "markov":
            assert self.markov_w1 is not None
            states = torch.cat([states, self.markov_w1(previous)], dim=-1)
        return F.logsigmoid(self.confidence(states).float())[:, 0]

    def inputs(self, last: torch.Tensor) -> torch.Tensor:
        """Input tokens of blocks, int64 [..., block], that begin with the ``last`` tokens int64 [...]."""
        block = last.new_full((*last.shape, self.block_size), self.options["mask"])
        block[..., 0] = last
        return block


@dataclass(frozen=True)
class DFlashConfig(LayerConfig):
    """Options of a head and of trees. ``confidence_threshold`` uses DSpark's confidence head, if the file has one."""

    prefill_chunk: int = 2048
    """As for a draft model, but of a token of the context only keys and values are computed."""
    unsupported: ClassVar = {"draft_window": "the windows of method 'dflash' are in its file"}


@drafters.register("dflash")
class DFlash(HeadLayerDrafter[DFlashConfig]):
    name = "dflash"
    config_class = DFlashConfig
    head_class = DFlashHead
    head: DFlashHead
    example_options: ClassVar = {
        "group": 16, "selector": {"rank": 4, "top": 6}, "markov": 4, "confidence": "markov",
    }  # fmt: skip
    """All features of DFlash2 and DSpark."""

    def __init__(self, config: DFlashConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.ids = None  # ``revise`` reads logits of the head's own vocabulary
        if self.learner is not None and self.head.domino is not None:
            raise ConfigError("Domino's correction does not learn while it serves: remove adapt")
        one_by_one = config.branches or config.confidence_threshold is not None or self.chooser.rule.needs_q
        corrections = (self.head.markov_w1, self.head.candidate_selector, self.head.domino)
        self.independent = not one_by_one and all(each is None for each in corrections)
        """Whether no choice depends on another."""

    def find_chains(self) -> None:
        self.chains = None

    def rows(self, depth: int) -> int:
        return self.head.block_size

    def _read(self, spans: list[Span], feature: torch.Tensor) -> None:
        self.decoder.read_context(Batch(spans, feature.device), self.attention, feature)

    def _grow(
        self, sequences: Requests, budgets: Sequence[int], ready: list[int], spans: list[Span], feature: torch.Tensor
    ) -> list[Draft]:
        self._read(spans, feature)
        states, logits = self._fill([sequences[index] for index in ready])
        if self.independent and all(can_chain(sequences[index]) for index in ready):
            return self._choose(sequences, budgets, ready, states, logits)
        slot = {index: i for i, index in enumerate(ready)}

        def previous(frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            """The token before each predicted one."""
            last = [drafts[i].tokens[node] if node >= 0 else sequences[i].tokens[-1] for i, node in frontier]
            return torch.tensor(last, device=states.device)

        memories: dict[tuple[int, int], torch.Tensor] = {}
        """Domino's GRU after each node."""

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            slots = [slot[index] for index, _ in frontier]
            before, rows = previous(frontier, drafts), logits[slots, depth]
            if (domino := self.head.domino) is not None:
                embedded = self.context.target.embed(before).to(states.dtype)
                parents = [(index, drafts[index].parents[node]) for index, node in frontier if node >= 0]
                memory = domino.gru(embedded, torch.stack([memories[each] for each in parents]) if parents else None)
                memories.update(zip(frontier, memory))
                rows = rows if depth < domino.first else rows + domino(states[slots, depth], memory).float()
            return self.revise(rows, states[slots, depth], before)

        def confidence(depth: int, frontier: Frontier, drafts: Drafts) -> list[float]:
            slots = [slot[index] for index, _ in frontier]
            return self.head.log_confidence(states[slots, depth], previous(frontier, drafts)).tolist()

        estimate = None if self.head.confidence is None else confidence
        return grow(sequences, ready, budgets, self.config, self.chooser, score, estimate)[0]

    def _choose(
        self, sequences: Requests, budgets: Sequence[int], ready: list[int], states: torch.Tensor, logits: torch.Tensor
    ) -> list[Draft]:
        """Chains by ``grow``, whose tokens are all chosen at once since none depends on another."""
        rows = [(slot, depth) for slot, index in enumerate(ready) for depth in range(budgets[index])]
        of = [sequences[ready[slot]] for slot, _ in rows]
        slots, depths = (list(each) for each in zip(*rows))
        scores = self.revise(logits[slots, depths], states[slots, depths], None)
        contexts = [self.chooser.row(sequence, [0] * depth) for sequence, depth in zip(of, depths)]
        ids, q, q_rows = self.chooser.choose(scores, contexts, [depth - 1 for depth in depths])
        drafts = [Draft() for _ in sequences]
        for slot, depth, tokens, row in zip(slots, depths, ids, q_rows):
            draft = drafts[ready[slot]]
            draft.q = q
            if tokens and len(draft) == depth:  # nothing follows where no token is permitted
                draft.add(tokens[0], depth - 1, row)
        return drafts

    def revise(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Makes the ``logits`` of rows with these ``states`` depend on the ``previous`` tokens; [n, target's
        vocabulary]. None: they do not."""
        head = self.head
        if previous is not None:
            logits = head.condition(logits, previous)
        if previous is not None and head.candidate_selector is not None:
            values, ids = logits.topk(min(head.options["selector"]["top"], logits.shape[1]), dim=-1)
            values = values + head.candidate_selector(previous, states, ids).float()
            logits = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
        return logits if head.lm_head is None else self.to_target_ids(logits)

    def _fill(self, sequences: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed states and logits [sequences, depth, ...] of the rows that predict drafted tokens."""
        head, target = self.head, self.context.target
        first = head.block_size - head.sizes.depth
        rows = list(range(first, first + self.config.num_speculative_tokens))
        blocks = head.inputs(torch.tensor([sequence.tokens[-1] for sequence in sequences], device=target.info.device))
        pairs = zip(sequences, blocks.tolist())
        spans = [Span(sequence.id, self._end(sequence), block, logits=rows) for sequence, block in pairs]
        states, logits = self._run(spans, target.embed(blocks.flatten()))
        return states.unflatten(0, (-1, len(rows))), logits.unflatten(0, (-1, len(rows)))
