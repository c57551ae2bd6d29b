"""What these tests need lies in Forerun's cache folder. Where it does not, they are skipped, and the end of the run
says so and what would bring it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import vocabularies

from forerun import LLM
from forerun.core.errors import ModelError
from forerun.models.fetch import fetched
from forerun.models.gguf import GGUFFile

_absent = pytest.StashKey[set[str]]()


def _skip(request: pytest.FixtureRequest, reason: str) -> None:
    request.config.stash.setdefault(_absent, set()).add(reason)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in sorted(terminalreporter.config.stash.get(_absent, set())):
        terminalreporter.write_line(f"NOT TESTED: {reason}", red=True, bold=True)


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The real model's checkpoint."""
    try:
        return fetched("smollm2")
    except ModelError as error:
        _skip(request, str(error))
        raise


@pytest.fixture(scope="session")
def assistant(smollm2: Path) -> LLM:
    """The real model as users get it, drafting from the text."""
    return LLM("smollm2", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, max_model_len=512)


@pytest.fixture(scope="session")
def vocabulary(request: pytest.FixtureRequest) -> Callable[[str], GGUFFile]:
    """llama.cpp's vocabularies, by name."""
    if not vocabularies.folder().is_dir():
        _skip(request, "llama.cpp's vocabularies are not on this machine: run `python tests/real/vocabularies.py` once")
    return lambda name: GGUFFile(vocabularies.folder() / f"ggml-vocab-{name}.gguf")
