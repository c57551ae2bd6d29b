"""From parents to additive masks."""

from __future__ import annotations

import torch

from forerun.core.batch import Span

NEG_INF = float("-inf")


def ancestors(span: Span) -> torch.Tensor:
    """bool [rows, stored + rows]: which nodes behind ``span.start`` each new row sees (itself included)."""
    total = span.stored + span.count
    seen = torch.zeros(total, total, dtype=torch.bool)
    parents = span.parents if span.parents is not None else list(range(-1, total - 1))
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen[span.stored :]


def tree_mask(span: Span, columns: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive [rows, columns] mask: committed entries, then ancestors, within ``window`` *positions* of the row
    (a sliding window counts positions, not rows)."""
    nodes = span.stored + span.count
    visible = torch.zeros(span.count, columns, dtype=torch.bool)
    visible[:, : span.start] = True
    visible[:, span.start : span.start + nodes] = ancestors(span)
    if window is not None:
        depths = torch.tensor(span.depths())
        where = torch.arange(columns)
        where[span.start : span.start + nodes] = span.start + depths
        rows = span.start + depths[span.stored :]
        visible &= rows[:, None] - where[None, :] < window
    return torch.zeros(span.count, columns, dtype=dtype).masked_fill_(~visible, NEG_INF)


class ChainMasks:
    """Causal masks as views of one template per shape, so that a decode builds no mask at all.

    Template column x stands for key ``x - reach + first``: row r of a chain whose first row is at position
    ``first`` sees x <= reach + r, so the mask of any ``first`` is a slice.
    """

    LONGEST = 64

    def __init__(self, reach: int, device: torch.device, dtype: torch.dtype) -> None:
        self.reach = reach
        self.device = device
        self.dtype = dtype
        self._templates: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def get(self, rows: int, groups: int, first: int, columns: int, window: int | None) -> torch.Tensor:
        """Additive [groups * rows, columns]; group-major, as queries of one KV head are folded."""
        if rows > self.LONGEST:
            return self._build(rows, groups, first, torch.arange(columns, device=self.device), window)
        key = (rows, groups, window)
        template = self._templates.get(key)
        if template is None:
            where = torch.arange(2 * self.reach, device=self.device)
            template = self._templates[key] = self._build(rows, groups, self.reach, where, window)
        return template[:, self.reach - first : self.reach - first + columns]

    def _build(self, rows: int, groups: int, first: int, columns: torch.Tensor, window: int | None) -> torch.Tensor:
        distance = first + torch.arange(rows, device=self.device)[:, None] - columns[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, NEG_INF)
        return mask.repeat(groups, 1)
