"""Bit equality: the logits of a verification against those of feeding the same tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from forerun.bench.lossless.result import Result, layout_name
from forerun.core.batch import Batch, Span
from forerun.models.base import Model, new_attention
from forerun.models.invariance import BRANCHES, self_test

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9)
"""Rows of the verifications, in turn."""


@torch.inference_mode()
def check_bits(model: Model, pairs: Seq[tuple[Seq[int], Seq[int]]], page_size: int | None) -> list[Result]:
    """``pairs`` are prompts and answers. Two results: the rows of these
    texts' verifications (a single row is what decoding feeds, and is not counted), and hundreds of random rows in every
    way that tokens are fed (chunks, neighbours, trees)."""
    good, total, detail = 0, 0, ""
    longest = max(len(prompt) + len(answer) + 1 for prompt, answer in pairs)
    attention = new_attention(model, max_seqs=1, max_len=longest, page_size=page_size, slack=max(WIDTHS))

    def feed(tokens: Seq[int], start: int) -> torch.Tensor:
        span = Span(0, start, list(tokens), logits=list(range(len(tokens))), source=source)
        return model.forward(Batch([span], model.info.device), attention).logits

    for prompt, answer in pairs:
        begin, source = model.info.begin(prompt)
        text, start = [*begin, *answer], len(begin)
        attention.pool.free(0)
        feed(text[:start], 0)
        single = torch.cat([feed(text[i : i + 1], i) for i in range(start, len(text))])
        attention.pool.truncate(0, start)
        position, turn = start, 0
        while position < len(text):
            width = min(WIDTHS[turn % len(WIDTHS)], len(text) - position)
            rows = feed(text[position : position + width], position)
            wanted = single[position - start : position - start + width]
            same = (rows == wanted).all(dim=1)
            if not detail and not bool(same.all()):
                detail = f"{width} rows at position {position} differ by up to {float((rows - wanted).abs().max()):.1e}"
            if width > 1:
                good, total = good + int(same.sum()), total + width
            position, turn = position + width, turn + 1
    path, layout = model.info.path, layout_name(page_size)
    failures = [str(failure) for failure in self_test(model, page_size=page_size)]
    tested, passed = total > 0, 0 < total == good
    if not tested:
        detail = "no answer has the two tokens of a verification: give more --max-tokens"
    return [
        Result("bit-equal logits", path, layout, None, good, total, "rows", passed, detail, tested=tested),
        _self_tested(path, layout, model, failures),
    ]


def _self_tested(path: str, layout: str, model: Model, failures: Seq[str]) -> Result:
    tested = bool(failures) or model.info.max_len > BRANCHES + 1
    detail = failures[0] if failures else "chunks, neighbours, trees"
    if not tested:
        detail = f"a context of {model.info.max_len} tokens leaves no two rows to compare"
    passed = tested and not failures
    what = f"{path}: self-test"
    return Result("bit-equal logits", what, layout, None, int(passed), 1, "runs", passed, detail, tested=tested)
