"""The documentation's site: ``make docs`` writes it to ``docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import generate

import forerun

project = "Forerun"
author = "The Forerun developers"
copyright = author
release = version = forerun.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
smartquotes = False  # it would make a dash of the two hyphens of an option
html_theme = "furo"
html_title = f"Forerun {release}"
html_static_path = ["figures"]
html_extra_path = ["llms.txt"]
html_copy_source = True  # every page is there as Markdown too
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
suppress_warnings = ["misc.highlighting_failure"]


def fill(app: object, name: str, source: list[str]) -> None:
    source[0] = generate.filled(source[0])


def setup(app: object) -> None:
    app.connect("source-read", fill)  # type: ignore[attr-defined]
