"""Drafts chains on a GPU without the host: a step is one CUDA graph, launched again for every further token.

A step chooses tokens with the target's own noise, writes them down, and feeds them; positions, cache entries and keys
of noise go on in device memory. One copy at the end brings all chains to the host. Where it has to cut them, it waits
for that; else the target verifies them first. Without CUDA (Triton's interpreter), the steps run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from weakref import proxy

import numpy as np
import torch
import triton
import triton.language as tl

from forerun.attention.base import Attention
from forerun.attention.triton import Sizes, TritonAttention, lay_out, write_numbers
from forerun.core.batch import Batch, Span
from forerun.core.inference import inference
from forerun.core.request import Requests
from forerun.core.tree import Draft
from forerun.kernels import gpu
from forerun.models.run.fused import RAW
from forerun.models.run.graphs import Numbers, Padded, Steps, bucket
from forerun.sampling import triton as sampling
from forerun.sampling.noise import target_key
from forerun.sampling.warp import restrictions
from forerun.speculate.draft.base import Chooser
from forerun.speculate.draft.levels import StepsConfig, floor_of

FIELDS = 5
"""What a step finds for a chain: the score of its token, the token, the log-probability of the likeliest token, and the
score and the token of the second choice; floats as their bits."""


@triton.jit(do_not_specialize=gpu.VARYING)
def _advance(
    best, second, sure, ids, found, steps, depths, keys, now, input_ids, positions, start, fed, row_span, rows, most,
    FIELDS: tl.constexpr, REDUCED: tl.constexpr, SURE: tl.constexpr,
):  # fmt: skip
    """Writes down what one chain chose, and makes it the next step's row. A chain of its full depth becomes padding, so
    that it writes no cache entry of another sequence."""
    row = tl.program_id(0)
    step, token = tl.load(steps + row), tl.load(best + 2 * row + 1)
    if REDUCED:
        token = tl.load(ids + token)
    to = found + (step * rows + row) * FIELDS
    tl.store(to, tl.load(best + 2 * row))
    tl.store(to + 1, token)
    if SURE:
        other = tl.load(second + 2 * row + 1)
        if REDUCED:
            other = tl.load(ids + other)
        tl.store(to + 2, tl.load(sure + row))
        tl.store(to + 3, tl.load(second + 2 * row))
        tl.store(to + 4, other)
    tl.store(input_ids + row, token)
    later = tl.where(step > 0, 1, 0)  # the first token is fed where the text ended
    tl.store(positions + row, tl.load(positions + row) + later)
    tl.store(start + row, tl.load(start + row) + later)
    tl.store(fed + row, tl.load(fed + row) + later)
    tl.store(steps + row, step + 1)
    if step + 1 >= tl.load(depths + row):
        tl.store(row_span + row, -1)
    for part in range(3):
        key = tl.load(keys + ((step + 1) * rows + row) * 3 + part, mask=step + 1 < most, other=0)
        tl.store(now + 3 * row + part, key)


class Bucket:
    """Chains side by side, of at most ``most`` tokens: their numbers, and the graphs that draft them."""

    def __init__(self, runner: GraphChains, sizes: Sizes, device: torch.device, state: torch.Tensor | None) -> None:
        self.runner, self.sizes = runner, sizes
        rows, most, steps = sizes.rows, runner.most, runner.steps
        lengths = {
            "forward": sum(sizes.fields().values()), "steps": rows, "depths": rows, "now": 3 * rows,
            "options": 4 * rows, "keys": 3 * rows * most,
        }  # fmt: skip
        self.numbers = Numbers(sum(lengths.values()), device)
        self.host = dict(zip(lengths, np.split(self.numbers.host, np.cumsum([*lengths.values()])[:-1])))
        self.parts = dict(zip(lengths, self.numbers.device.split_with_sizes([*lengths.values()])))
        self.batch = Padded(sizes, device, () if state is None else (RAW,))
        self.tables = lay_out(self.parts["forward"], self.batch, sizes)
        self.logits = torch.zeros(rows, steps.size, device=device)
        if state is not None:
            self.batch.embeds = state.new_zeros(rows, state.shape[1])
        self.found = torch.zeros(most + 1, rows, FIELDS, dtype=torch.int32, device=device)  # captures run a step more
        self._first: Callable[[], None] | None = None
        self._next: Callable[[], None] | None = None

    def run(self, begin: Callable[[], None], longest: int) -> gpu.HostCopy:
        """Drafts ``longest`` tokens of each chain after ``begin``, which writes the first step's numbers. Returns int32
        [longest * rows * FIELDS], of which the next call overwrites those on the device."""
        if self._first is None or self._next is None:
            begin()
            self._first, self._next = self._record(partial(self._choose, self.logits)), self._record(self._step)
        begin()
        self._first()
        for _ in range(longest - 1):
            self._next()
        return gpu.HostCopy(self.found[:longest].view(-1))

    def _record(self, body: Callable[[], None]) -> Callable[[], None]:
        graphs = self.runner.steps.graphs
        return (graphs.record(body, self.sizes.rows) if graphs.enabled else None) or body

    def _step(self) -> None:
        steps = self.runner.steps
        output = steps.body(self.batch, self.tables)
        if steps.state is not None and self.batch.embeds is not None:
            self.batch.embeds.copy_(steps.state(output))
        self._choose(output.logits)

    def _choose(self, logits: torch.Tensor) -> None:
        """Chooses every chain's next token."""
        runner, parts, forward = self.runner, self.parts, self.tables.parts
        words, now, sures = runner.words, parts["now"], runner.floor > -inf
        scores = sampling.restrict_rows(logits, parts["options"].view(torch.float32))
        best = second = sure = sampling.choose_rows(scores, words, now)
        if sures:  # as ``Sampler.rank`` has it
            sure = (logits.amax(1).double() - logits.double().logsumexp(1)).float().view(torch.int32)
            second = sampling.choose_rows(scores.scatter_(1, best[:, 1:].long(), -inf), words, now)
        _advance[(self.sizes.rows,)](
            best, second, sure, runner.words if runner.ids is None else runner.ids, self.found, parts["steps"],
            parts["depths"], parts["keys"], now,
            **{name: forward[name] for name in ("input_ids", "positions", "start", "fed", "row_span")},
            rows=self.sizes.rows, most=runner.most, FIELDS=FIELDS, REDUCED=runner.ids is not None, SURE=sures,
        )  # fmt: skip

    def write(self, batch: Batch, tables: dict[int, list[int]], chosen: Requests, depths: Sequence[int]) -> None:
        """Writes the numbers of a first step that feeds ``batch``."""
        chooser, host, rows = self.runner.chooser, self.host, self.sizes.rows
        self.numbers.wait()
        write_numbers(host["forward"], batch, tables, self.sizes)
        for name in ("steps", "depths", "options", "keys"):
            host[name][:] = 0
        host["depths"][: len(chosen)] = depths
        restricted = restrictions([chooser.row(sequence) for sequence in chosen])
        options = sampling.options(*restricted)
        host["options"][: options.size] = options.view(np.int32).ravel()
        keys = host["keys"].reshape(-1, rows, 3)
        for step in range(max(depths)):
            keys[step, : len(chosen)] = sampling.halves([
                target_key(s.seed, len(s.tokens) + step) if temperature else None
                for s, temperature in zip(chosen, restricted[0])
            ])  # fmt: skip
        host["now"][:] = keys[0].ravel()


class GraphChains:
    """Drafts chains with graphs, under rules that need no q; see ``ChainRunner``, whose tokens it gives."""

    def __init__(self, steps: Steps, chooser: Chooser, config: StepsConfig, ids: torch.Tensor | None) -> None:
        self.steps, self.chooser, self.floor, self.most = steps, chooser, config.floor, config.num_speculative_tokens
        assert chooser.sampler.noise.on_gpu is not None
        words = chooser.sampler.noise.on_gpu.words
        self.words = words if ids is None else words[ids].contiguous()
        """The hashed ids that noise is keyed by, one for each output."""
        self.ids = None if ids is None else ids.int()
        """The tokens that the logits are of, ascending; None: the target's vocabulary."""

    @classmethod
    def find(
        cls, steps: Steps, chooser: Chooser, config: StepsConfig, output_ids: torch.Tensor | None
    ) -> GraphChains | None:
        """Returns None for options that it does not serve."""
        size = chooser.sampler.vocab_size if output_ids is None else len(output_ids)
        serves = chooser.sampler.noise.on_gpu is not None and steps.size == size
        return cls(steps, chooser, config, output_ids) if serves and not chooser.rule.needs_q else None

    @inference
    def draft(
        self, sequences: Requests, ready: Sequence[int], budgets: Sequence[int], batch: Batch, attention: Attention,
        embeds: torch.Tensor | None = None, texts: Sequence[Sequence[int]] = (),
    ) -> list[Draft]:  # fmt: skip
        """See ``ChainRunner.draft``. Nothing is looked up: a step costs what a row of more costs, and a launch."""
        assert isinstance(attention, TritonAttention)
        chosen, depths = [sequences[i] for i in ready], [budgets[i] for i in ready]
        spans, longest = [span for span in batch.spans if span.logits], max(depths)
        if len(spans) != len(chosen):
            raise ValueError(f"{len(spans)} spans that ask for logits for {len(chosen)} sequences")
        if embeds is not None:
            batch.embeds, batch.hidden = embeds, (RAW,)
        read, tables = self.steps.forward(batch, attention), attention.pool.block_tables
        state = None if self.steps.state is None else self.steps.state(read)
        after = Batch([Span(span.key, span.end, [0], logits=[0]) for span in spans], batch.device)
        sizes = bucket(Sizes.of(after, tables))
        end = max(span.end + depth for span, depth in zip(spans, depths))
        make = partial(Bucket, proxy(self), sizes, batch.device, state)
        chains = self.steps.graphs.get(self, sizes, self.steps.at(end), make)

        def begin() -> None:
            chains.write(after, tables, chosen, depths)
            chains.numbers.copy()
            chains.logits[: len(chosen)].copy_(read.logits)
            if state is not None and chains.batch.embeds is not None:
                chains.batch.embeds[: len(chosen)].copy_(state)

        found, drafts = chains.run(begin, longest), [Draft() for _ in sequences]
        cut = self.floor > -inf  # the host shortens chains; else nobody waits for them before they are verified
        values = found.read().view(longest, sizes.rows, FIELDS).numpy() if cut else None
        for row, (index, depth, span) in enumerate(zip(ready, depths, spans)):
            if values is None:
                draft = Draft.late_chain(found, [FIELDS * (step * sizes.rows + row) + 1 for step in range(depth)])
            else:
                draft = self._cut(values[:depth, row], floor_of(sequences[index], self.floor))
            drafts[index] = draft
            attention.pool.advance(span.key, span.end + max(0, draft.depth - 1))  # its last token was not fed
        return drafts

    def _cut(self, found: np.ndarray, floor: float) -> Draft:
        """The chain of one sequence: it ends where no token is permitted, or where its confidence falls below the
        floor. There the second choice is verified beside its last token."""
        floats, chain, log = found.view(np.float32), list[int](), 0.0
        for step, (values, numbers) in enumerate(zip(floats, found), 1):
            if not values[0] > -inf:
                break
            chain.append(int(numbers[1]))
            log += float(values[2])
            if log < floor:
                draft = Draft.chain(chain)
                if step < len(found) and values[3] > -inf and self.chooser.rule.trees:
                    draft.add(int(numbers[4]), len(chain) - 2)
                return draft
        return Draft.chain(chain)
