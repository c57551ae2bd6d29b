"""Forms of weights, a file each, by their names as options."""

from __future__ import annotations

from forerun.models.formats import blocks, int8, packed, plain, tiled, torchao
from forerun.models.formats.base import Format

FLOATS: dict[str, Format] = {found.name: found for found in (tiled.FORMAT, packed.FORMAT, plain.FORMAT)}
"""Of the checkpoint's own numbers; the best first."""
ON_CPU: dict[str, Format] = {found.name: found for found in (*int8.FORMATS, *blocks.FORMATS)}
ON_GPU: dict[str, Format] = {found.name: found for found in torchao.FORMATS}
"""What weights can be quantized to."""
