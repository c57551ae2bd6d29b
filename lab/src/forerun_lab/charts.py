"""Drawings for one-file HTML pages (``forerun.measure.page``), without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#38c", "#c63", "#393", "#936", "#666", "#b80", "#08a", "#a22")
WIDTH, HEIGHT, LEFT, BELOW = 560, 260, 50, 40
Points = Sequence[tuple[float, float]]


def chart(
    lines: Mapping[str, Points],
    dots: Mapping[str, Points],
    x: str,
    y: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> str:
    """Lines and dots of one colour per name over common axes; ``bands`` are intervals (x, low, high) at dots."""
    names = list(dict.fromkeys([*lines, *dots]))
    spans = [(at, value) for band in (bands or {}).values() for at, low, high in band for value in (low, high)]
    every = [point for points in [*lines.values(), *dots.values()] for point in points] + spans
    if not every:
        return ""
    right, top = max(a for a, _ in every), max(b for _, b in every) * 1.05 or 1.0
    left = min(a for a, _ in every)

    def at(a: float, b: float) -> tuple[float, float]:
        across = (a - left) / (right - left) if right > left else 0.5
        return LEFT + across * (WIDTH - LEFT - 10), (HEIGHT - BELOW) * (1 - b / top)

    drawn = [_axes(left, right, top, x, y)]
    for name, colour in zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(*point) for point in lines.get(name, ())))
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for index, low, high in (bands or {}).get(name, ()):
            (a, b), (_, c) = at(index, low), at(index, high)
            drawn.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{a:.1f}" y2="{c:.1f}" stroke="{colour}"/>')
        for point in dots.get(name, ()):
            a, b = at(*point)
            drawn.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>')
        line = names.index(name)
        drawn.append(f'<text x="{WIDTH + 10}" y="{20 + 18 * line}" fill="{colour}">{escape(name)}</text>')
    return f'<svg width="{WIDTH + 180}" height="{max(HEIGHT, 30 + 18 * len(names))}">{"".join(drawn)}</svg>'


def _axes(left: float, right: float, top: float, x: str, y: str) -> str:
    floor = HEIGHT - BELOW
    levels = [(floor * (1 - fraction), top * fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1 / 1.05)]
    marks = [
        f'<text x="{LEFT - 6}" y="{level + 4:.0f}" text-anchor="end">{value:.3g}</text>'
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{level:.0f}" y2="{level:.0f}" stroke="#ddd"/>'
        for level, value in levels
    ]
    ends = (
        f'<text x="{LEFT}" y="{floor + 16}">{left:.3g}</text>'
        f'<text x="{WIDTH - 10}" y="{floor + 16}" text-anchor="end">{right:.3g}</text>'
        f'<text x="{(LEFT + WIDTH) // 2}" y="{floor + 32}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="{LEFT + 4}" y="12">{escape(y)}</text>'
    )
    return "".join(marks) + ends
