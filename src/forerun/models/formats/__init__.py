"""Forms of weights, a file each, by their names as options."""

from __future__ import annotations

from forerun.models.formats import blocks, int8, plain, tiled
from forerun.models.formats.base import Format

FLOATS: dict[str, Format] = {found.name: found for found in (tiled.FORMAT, plain.PACKED, plain.PLAIN)}
"""Of the checkpoint's own numbers; the best first."""
ON_CPU: dict[str, Format] = {found.name: found for found in (*int8.FORMATS, *blocks.FORMATS)}
ON_GPU: dict[str, Format] = {found.name: found for found in plain.ON_GPU}
"""What weights can be quantized to."""
