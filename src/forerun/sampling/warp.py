"""Warping: from logits to the sampled distribution, for the target's p and the drafter's q alike. Each row has its
request's options and its own context, the drafted tokens before it included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch

from forerun.core.request import RequestState
from forerun.kernels import gpu
from forerun.sampling import compiled
from forerun.sampling.params import SamplingParams

NEG_INF = float("-inf")


@dataclass(slots=True)
class Row:
    """The context of one row of logits: it predicts the token after ``sequence.tokens`` and the drafted ``path``."""

    sequence: RequestState
    path: Sequence[int] = ()
    temperature: float | None = None
    """A drafter's own temperature, in place of the request's."""

    @property
    def position(self) -> int:
        """Absolute position of the predicted token."""
        return len(self.sequence.tokens) + len(self.path)

    @property
    def effective_temperature(self) -> float:
        params = self.sequence.params
        if self.temperature is None or params.greedy:
            return float(params.temperature)
        return self.temperature


def warp(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Returns float32 [rows, vocabulary] logits whose softmax is the sampled distribution; banned tokens are -inf.

    ``logits`` may be changed in place. A greedy row, whose argmax is sampled, is edited but not scaled or filtered.
    """
    logits = edit(logits, rows)
    if not any(row.effective_temperature for row in rows):
        return logits
    if logits.dtype == torch.float32:
        if compiled.can_sample(logits.device):
            return _restrict(logits, rows, compiled.restrict)
        if gpu.serves(logits.device):
            from forerun.sampling import triton  # which not every system has

            return _restrict(logits, rows, triton.restrict)
    scales = [row.effective_temperature or 1.0 for row in rows]
    if any(scale != 1.0 for scale in scales):
        logits = logits / torch.tensor(scales, device=logits.device)[:, None]
    chosen = [i for i, row in enumerate(rows) if row.effective_temperature > 0.0 and row.sequence.params.filters]
    if chosen:
        params = [rows[i].sequence.params for i in chosen]
        if len(chosen) == len(rows):
            return _filter(logits, params)
        logits = logits.clone()
        logits[chosen] = _filter(logits[chosen], params)
    return logits


def _restrict(logits: torch.Tensor, rows: Sequence[Row], kernel: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Temperature and filters through a kernel."""
    options = restrictions(rows)
    if not any(each != 1.0 or row.sequence.params.filters for each, row in zip(options[0], rows) if each):
        return logits
    return kernel(logits, *options)


def restrictions(rows: Sequence[Row]) -> tuple[list[float], list[float], list[int]]:
    """As kernels take them: each row's temperature, its min-p and its top-p in turns, and its top-k."""
    params = [row.sequence.params for row in rows]
    thresholds = [threshold for each in params for threshold in (each.min_p, each.top_p)]
    return [row.effective_temperature for row in rows], thresholds, [each.top_k for each in params]


def edit(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Applies allowed ids, logit bias, bans, penalties and grammars to the rows whose requests have them."""
    for i, row in enumerate(rows):
        params = row.sequence.params
        if params.edits:
            _bias_and_ban(logits[i], row)
            if params.penalised:
                _penalise(logits[i], row)
    _constrain(logits, rows)
    return logits


def _constrain(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Bans the tokens that a request's grammar does not permit after the row's path."""
    chosen, masks = [], []
    for i, row in enumerate(rows):
        constraint = row.sequence.constraint
        mask = constraint.allowed(row.sequence, row.path) if constraint is not None else None
        if mask is not None:
            chosen.append(i)
            masks.append(mask)
    if not chosen:
        return
    words = gpu.send(torch.stack(masks), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    if len(chosen) == len(rows):
        logits.masked_fill_(~allowed, NEG_INF)
    else:
        places = gpu.send(chosen, logits.device)
        logits[places] = logits[places].masked_fill(~allowed, NEG_INF)


def _bias_and_ban(logits: torch.Tensor, row: Row) -> None:
    sequence, params = row.sequence, row.sequence.params
    if params.allowed_token_ids:
        ids = _ids(params.allowed_token_ids, logits)
        kept = logits[ids]
        logits.fill_(NEG_INF)[ids] = kept
    if params.logit_bias:
        values = [bias for token, bias in params.logit_bias.items() if token < logits.shape[0]]
        biases = gpu.send(torch.tensor(values, dtype=logits.dtype), logits.device)
        logits.index_add_(0, _ids(params.logit_bias, logits), biases)
    banned: set[int] = set()
    if sequence.num_output + len(row.path) < params.min_tokens:
        ends = {*sequence.eos_ids, *params.stop_token_ids}
        banned.update(() if _must_end(row, ends) else ends)
    if params.bad_words_ids:
        context = _output_tail(row, max(len(word) for word in params.bad_words_ids) - 1)
        for word in params.bad_words_ids:
            before = len(word) - 1
            if before <= len(context) and tuple(context[len(context) - before :]) == word[:-1]:
                banned.add(word[-1])
    if banned:
        logits.index_fill_(0, _ids(banned, logits), NEG_INF)


def _ids(tokens: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    """Those of ``tokens`` that a row of ``logits`` has, on its device."""
    known = [token for token in tokens if token < logits.shape[0]]
    return gpu.send(torch.tensor(known, dtype=torch.long), logits.device)


def _must_end(row: Row, ends: Iterable[int]) -> bool:
    """Whether the row's grammar permits nothing but tokens that end the text."""
    constraint = row.sequence.constraint
    mask = constraint.allowed(row.sequence, row.path) if constraint is not None else None
    if mask is None:
        return False
    allowed = numpy.unpackbits(mask.numpy().view(numpy.uint8), bitorder="little")
    allowed[[token for token in ends if token < len(allowed)]] = 0
    return not allowed.any()


def _output_tail(row: Row, count: int) -> list[int]:
    """The last ``count`` output tokens before the row. As in vLLM, the prompt does not count towards a bad word."""
    if len(row.path) >= count:
        return list(row.path[len(row.path) - count :])
    tokens = row.sequence.tokens
    return [*tokens[max(row.sequence.num_prompt, len(tokens) - count + len(row.path)) :], *row.path]


def _penalise(logits: torch.Tensor, row: Row) -> None:
    sequence, params = row.sequence, row.sequence.params
    if logits.dtype == torch.float32 and compiled.can_sample(logits.device) and logits.is_contiguous():
        compiled.penalise(logits, [*sequence.tokens, *row.path], sequence.num_prompt, params)
        return
    ids = _ids([*sequence.tokens[sequence.num_prompt :], *row.path], logits)
    counts = logits.new_zeros(logits.shape, dtype=torch.float32)
    counts.index_add_(0, ids, torch.ones(len(ids), device=logits.device))
    if params.repetition_penalty != 1.0:
        seen = (counts > 0).index_fill_(0, _ids(sequence.tokens[: sequence.num_prompt], logits), True)
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits.copy_(torch.where(seen, scaled, logits))
    if params.frequency_penalty:
        logits -= params.frequency_penalty * counts
    if params.presence_penalty:
        logits -= params.presence_penalty * (counts > 0)


def _filter(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """min-p, then top-k, then top-p: other tokens become -inf. Ties with the last kept token are kept."""
    device = logits.device
    size = logits.shape[1]
    floor = torch.full((len(params), 1), NEG_INF, device=device)
    if any(p.min_p > 0 for p in params):
        ratio = torch.tensor([p.min_p for p in params], device=device)[:, None]
        floor = torch.maximum(floor, logits.amax(dim=1, keepdim=True) + ratio.log())
    ks = [min(p.top_k, size) if p.top_k > 0 else size for p in params]
    if min(ks) < size:
        widest = max(k for k in ks if k < size)
        values = logits.topk(widest, dim=1).values
        last = torch.tensor([min(k, widest) - 1 for k in ks], device=device)[:, None]
        cut = values.gather(1, last)
        cut[torch.tensor([k == size for k in ks], device=device)] = NEG_INF
        floor = torch.maximum(floor, cut)
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if nucleus:
        kept = logits if len(nucleus) == len(params) else logits[nucleus]
        if any(params[i].min_p > 0 or ks[i] < size for i in nucleus):
            kept = kept.masked_fill(kept < floor[nucleus], NEG_INF)
        cut = _top_p_floor(kept, torch.tensor([params[i].top_p for i in nucleus], device=device))
        floor[nucleus] = torch.maximum(floor[nucleus], cut)
    return logits.masked_fill(logits < floor, NEG_INF)


def _top_p_floor(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the smallest logit of the smallest set whose share of the probability reaches top_p."""
    if logits.device.type == "cpu":  # NumPy's sort of a wide row is some twenty times faster than torch's
        values = torch.from_numpy(numpy.sort(logits.neg().numpy(), axis=1)).neg_()
    else:
        values = logits.sort(dim=1, descending=True).values
    mass = (values - values[:, :1]).exp().cumsum(dim=1)
    last = (mass < mass[:, -1:] * top_p[:, None]).sum(dim=1).clamp(max=values.shape[1] - 1)
    return values.gather(1, last[:, None])
