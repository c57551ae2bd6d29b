"""From parents to additive masks."""

from __future__ import annotations

import torch

from forerun.core.batch import Span

NEG_INF = float("-inf")
FOLDED = 4
"""Folded rows come in fours: on CPU a product of 1 to 3 rows, or their rest in a block of 32, rounds differently, and
one of 3 rows is slower than one of 4."""


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


def repeat(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """A mask [rows, columns] for folded queries: ``groups`` times each row, padded with the last one."""
    mask = mask.repeat_interleave(groups, dim=0)
    spare = -mask.shape[0] % FOLDED
    return torch.cat([mask, mask[-1:].expand(spare, -1)]) if spare else mask


class ChainMasks:
    """Causal masks as views of one template per shape, so that a decode builds no mask at all.

    Template column x stands for key ``x - reach + first``: row r of a chain whose first row is at position
    ``first`` sees x <= reach + r, so the mask of any ``first`` is a slice.
    """

    LONGEST = 16
    SHORTEST_REACH = 1024

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._templates: dict[tuple[int, int, int | None], tuple[int, torch.Tensor]] = {}

    def get(self, rows: int, groups: int, first: int, columns: int, window: int | None) -> torch.Tensor:
        """Additive [folded rows, columns] as ``repeat`` lays them out; a single row is one line for all groups."""
        if rows > self.LONGEST:
            return self._build(rows, groups, first, torch.arange(columns, device=self.device), window)
        key = (rows, groups, window)
        reach, template = self._templates.get(key, (0, None))
        if template is None or reach < columns:
            reach = max(self.SHORTEST_REACH, 1 << (columns - 1).bit_length())
            template = self._build(rows, groups, reach, torch.arange(2 * reach, device=self.device), window)
            self._templates[key] = (reach, template)
        return template[:, reach - first : reach - first + columns]

    def _build(self, rows: int, groups: int, first: int, columns: torch.Tensor, window: int | None) -> torch.Tensor:
        distance = first + torch.arange(rows, device=self.device)[:, None] - columns[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, NEG_INF)
        return mask if rows == 1 else repeat(mask, groups)
