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

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.core.request import Requests
from forerun.core.tree import Draft, Drafts
from forerun.kernels import gpu
from forerun.models.architectures.drafters import dflash, head_config
from forerun.models.architectures.shapes import Shape, shapes
from forerun.models.architectures.spec import Spec
from forerun.models.run.parts import BlockConvolution
from forerun.models.weights.published import read_dflash
from forerun.sampling.draw import target_keys
from forerun.sampling.warp import warp
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.chain import FEEDS_NORMED, can_chain
from forerun.speculate.draft.heads.head import OUTPUT, Head, Sizes
from forerun.speculate.draft.heads.layers import HeadLayerDrafter, LayerConfig
from forerun.speculate.draft.levels import Frontier, floor_of, grow

DEFAULTS: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "width": 16, "inner_size": 64, "blocks": 1, "theta": 10000.0, "eps": 1e-6, "mask": 0,
    "from_anchor": False, "windows": None, "causal": None, "group": None, "selector": None, "markov": None,
    "confidence": None, "biased": False, "domino": None,
}  # fmt: skip
SELECTOR = "candidate_selector"


class DFlashHead(Head):
    """Options: sizes, ``layers`` (hidden states read), ``mask`` (the mask token), ``from_anchor``, ``windows`` and
    ``causal`` per layer, ``group`` of the convolutions, ``selector`` (rank, top), ``markov`` (rank), ``confidence``
    (``markov`` if that head also reads the Markov code), ``domino`` (state, inner, first), ``own_head``,
    ``draft_vocab_size``."""

    method = "dflash"
    quantizes = True
    read_public = staticmethod(read_dflash)
    feeds = FEEDS_NORMED
    options_known = frozenset(DEFAULTS) | {"layers", "own_head", "draft_vocab_size"}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = {**DEFAULTS, **sizes.options}
        self.config = head_config(sizes, self.options)
        self.spec = dflash(self.config, self.block_size, self.options)

    def shapes(self) -> dict[str, Shape]:
        o, size, words = self.options, self.sizes.hidden_size, self.sizes.vocab_size
        own, rank, selector, domino = o.get("draft_vocab_size") or words, o["markov"], o["selector"], o["domino"]
        result = shapes(self.config, self.spec) | self.output_shapes()
        result |= {"fc.weight": (size, len(self.layers) * size), "hidden_norm.weight": (size,)}
        for block in range(o["blocks"]):
            prefix = f"blocks.{block}."
            for part in ("q", "k", "v", "o") if o["biased"] else ():
                result[f"{prefix}{part}_proj.bias"] = result[f"{prefix}{part}_proj.weight"][:1]
            for part in ("attention_conv", "mlp_conv") if o["group"] is not None else ():
                taps = BlockConvolution.TAPS
                result[f"{prefix}{part}.base_kernel"] = (2, taps, size)
                result[f"{prefix}{part}.kernel_projection.weight"] = (2 * taps * (size // o["group"]), size)
        if selector is not None:
            result |= {
                f"{SELECTOR}.{side}_codebook": (words, selector["rank"]) for side in ("predecessor", "successor")
            }
            result[f"{SELECTOR}.hidden_projection.weight"] = (selector["rank"], size)
        if rank:
            result |= {"markov_w1.weight": (words, rank), "markov_w2.weight": (own, rank)}
        if domino is not None:
            state, inner = domino["state"], domino["inner"]
            result |= {"domino.gru.weight_ih": (3 * state, size), "domino.gru.weight_hh": (3 * state, state)}
            result |= {"domino.enter.weight": (inner, size + state), "domino.leave.weight": (own, inner)}
        if o["confidence"]:
            inputs = size + (rank if o["confidence"] == "markov" else 0)
            result |= {"confidence.weight": (1, inputs), "confidence.bias": (1,)}
        return result

    def pack(self) -> None:
        super().pack()
        self.fc: Any = self.linear_of("fc")
        self.hidden_norm: Any = self.norm_of("hidden_norm")
        names = ("markov_w2", f"{SELECTOR}.hidden_projection", "domino.enter", "domino.leave", "confidence")
        self.parts = {name: self.linear_of(name) for name in names if f"{name}.weight" in self.tensors}

    def default_layers(self, last: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    @property
    def block_size(self) -> int:
        """Rows of a block; the last ``sizes.depth`` of them predict tokens."""
        return self.sizes.depth + (0 if self.options["from_anchor"] else 1)

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """What blocks attend to, [..., hidden size], of the target's hidden states [..., layers * hidden size]."""
        result: torch.Tensor = self.hidden_norm(self.fc(hidden))
        return result

    def described(self) -> tuple[Any, Spec, dict[str, torch.Tensor]]:
        """Config, spec and weights of the layers, the final norm, and the output layer if it has its own."""
        kept = ("blocks.", "norm.", OUTPUT)
        return self.config, self.spec, {name: each for name, each in self.tensors.items() if name.startswith(kept)}

    def condition(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Makes logits [n, own vocabulary] depend on the ``previous`` tokens int64 [n], if the head does that."""
        if not self.options["markov"]:
            return logits
        return logits + self.parts["markov_w2"](self.tensors["markov_w1.weight"][previous]).float()

    def select(self, previous: torch.Tensor, states: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Scores [n, candidates], (predecessor's code * projected state) . candidate's code, for the ``previous``
        tokens int64 [n] and states [n, hidden size]."""
        before, after = (self.tensors[f"{SELECTOR}.{side}_codebook"] for side in ("predecessor", "successor"))
        query = before[previous] * self.parts[f"{SELECTOR}.hidden_projection"](states)
        return (query[:, None] * after[candidates]).sum(-1)

    def remember(self, embedded: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        """Domino's GRU [n, state] after further tokens, by their embeddings [n, hidden size]; None: after none."""
        read, kept = (self.tensors[f"domino.gru.weight_{side}"] for side in ("ih", "hh"))
        memory = embedded.new_zeros(len(embedded), kept.shape[1]) if memory is None else memory
        return torch.gru_cell(embedded, memory, read, kept)

    def correct(self, states: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Domino's scores of all tokens [n, own vocabulary], of states [n, hidden size] and the GRU's [n, state]."""
        inner = F.silu(self.parts["domino.enter"](torch.cat([states, memory], dim=-1)))
        return self.parts["domino.leave"](inner).float()

    def log_confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Log of the probability that each row's token is accepted if those before it are. States [n, hidden size]."""
        if self.options["confidence"] == "markov":
            states = torch.cat([states, self.tensors["markov_w1.weight"][previous]], dim=-1)
        return F.logsigmoid(self.parts["confidence"](states).float())[:, 0]

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
        domino = self.head.options["domino"] is not None
        if self.learner is not None and domino:
            raise ConfigError("Domino's correction does not learn while it serves: remove adapt")
        floor, has = config.confidence_threshold is not None, self.head.options
        self.independent = not (domino or has["markov"] or has["selector"] or floor)
        """Whether no choice depends on another."""
        one_by_one = config.branches or self.chooser.rule.needs_q or (floor and not has["confidence"])
        self.kernels: Any = None if one_by_one else self.chooser.sampler.noise.on_gpu
        """Choose tokens that stay on the GPU until all of a chain are chosen."""

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
        if self.kernels is not None and all(can_chain(sequences[index]) for index in ready):
            return self._choose_late(sequences, budgets, ready, states, logits)
        slot = {index: i for i, index in enumerate(ready)}

        def previous(frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            """The token before each predicted one."""
            last = [drafts[i].tokens[node] if node >= 0 else sequences[i].tokens[-1] for i, node in frontier]
            return torch.tensor(last, device=states.device)

        memories: dict[tuple[int, int], torch.Tensor] = {}
        """Domino's GRU after each node."""

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            slots = [slot[index] for index, _ in frontier]
            parents = [(index, drafts[index].parents[node]) for index, node in frontier if node >= 0]
            kept = torch.stack([memories[each] for each in parents]) if parents and memories else None
            before = previous(frontier, drafts)
            rows, memory = self._correct(depth, logits[slots, depth], states[slots, depth], before, kept)
            memories.update(zip(frontier, () if memory is None else memory))
            return self.revise(rows, states[slots, depth], before)

        def confidence(depth: int, frontier: Frontier, drafts: Drafts) -> list[float]:
            slots = [slot[index] for index, _ in frontier]
            return self.head.log_confidence(states[slots, depth], previous(frontier, drafts)).tolist()

        estimate = confidence if self.head.options["confidence"] else None
        return grow(sequences, ready, budgets, self.config, self.chooser, score, estimate)[0]

    def _correct(
        self, depth: int, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Domino's correction of ``logits`` behind the tokens ``before``, and its GRU after them; ``memory``: then."""
        if (domino := self.head.options["domino"]) is None:
            return logits, None
        memory = self.head.remember(self.context.target.embed(before).to(states.dtype), memory)
        return logits if depth < domino["first"] else logits + self.head.correct(states, memory), memory

    def _choose_late(
        self, sequences: Requests, budgets: Sequence[int], ready: list[int], states: torch.Tensor, logits: torch.Tensor
    ) -> list[Draft]:
        """Chains by ``grow``, whose tokens stay on the GPU. The host waits for them only where it has to cut them."""
        chosen, depth = [sequences[index] for index in ready], max(budgets[index] for index in ready)
        floor, parts, memory = self.config.floor, list[torch.Tensor](), None
        before = gpu.send([sequence.tokens[-1] for sequence in chosen], logits.device)
        for steps in [range(depth)] if self.independent else [range(i, i + 1) for i in range(depth)]:
            rows, hidden = (side[:, steps[0] : steps[-1] + 1].flatten(0, 1) for side in (logits, states))
            contexts = [self.chooser.row(sequence, [0] * step) for sequence in chosen for step in steps]
            rows, memory = self._correct(steps[0], rows, hidden, before, memory)
            scores = warp(self.chooser.align(self.revise(rows, hidden, before)), contexts)
            found = self.kernels.find(scores, target_keys(contexts))
            if floor > -inf:
                found = torch.cat([found, self.head.log_confidence(hidden, before).view(torch.int32)[:, None]], 1)
            parts.append(found.unflatten(0, (len(chosen), len(steps))))
            before = found[:, 1].long()
        found, drafts = torch.cat(parts, 1), [Draft() for _ in sequences]
        late, size = gpu.HostCopy(found.flatten()), found.shape[2]
        counts = [budgets[index] for index in ready]
        if floor > -inf:
            sums = late.read().numpy().view(np.float32).reshape(found.shape)[:, :, 2].cumsum(1, np.float64)
            floors = [floor_of(sequence, floor) for sequence in chosen]
            counts = [1 + int((row[: n - 1] >= least).cumprod().sum()) for row, n, least in zip(sums, counts, floors)]
        for slot, (index, count) in enumerate(zip(ready, counts)):
            drafts[index] = Draft.late_chain(late, [size * (slot * depth + step) + 1 for step in range(count)])
        return drafts

    def revise(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Makes the ``logits`` of rows with these ``states`` depend on the ``previous`` tokens; [n, target's
        vocabulary]."""
        head = self.head
        logits = head.condition(logits, previous)
        if head.options["selector"] is not None:
            values, ids = logits.topk(min(head.options["selector"]["top"], logits.shape[1]), dim=-1)
            values = values + head.select(previous, states, ids).float()
            logits = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
        return self.to_target_ids(logits)

    def _fill(self, sequences: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed states and logits [sequences, depth, ...] of the rows that predict drafted tokens."""
        head, target = self.head, self.context.target
        first = head.block_size - head.sizes.depth
        rows = list(range(first, first + self.config.num_speculative_tokens))
        blocks = head.inputs(torch.tensor([sequence.tokens[-1] for sequence in sequences]))
        pairs = zip(sequences, blocks.tolist())
        spans = [Span(sequence.id, self._end(sequence), block, logits=rows) for sequence, block in pairs]
        states, logits = self._run(spans, target.embed(gpu.send(blocks.flatten(), target.info.device)))
        return states.unflatten(0, (-1, len(rows))), logits.unflatten(0, (-1, len(rows)))
