"""What these tests need lies in Forerun's cache folder. Where it does not, they do not exist, and the end of the run
says so and what would bring it."""

from collections import Counter

import gemma as gemma_file
import pytest
import vocabularies

from forerun import LLM
from forerun.core.errors import ModelError
from forerun.models.files.fetch import fetched
from forerun.models.files.gguf import GGUFFile
from here import LEFT_OUT


def _absent(fixture):
    """Why what a fixture needs is not here; None where it is."""
    if fixture == "vocabulary" and not vocabularies.folder().is_dir():
        return "llama.cpp's vocabularies are not on this machine yet: run `python tests/real/vocabularies.py` once"
    if fixture == "gemma" and not gemma_file.file().is_file():
        return "Gemma 3 270M is not on this machine yet: run `python tests/real/gemma.py` once (240 MB)"
    if fixture == "smollm2":
        try:
            fetched("smollm2")
        except ModelError as error:
            return str(error)
    return None


def pytest_collection_modifyitems(config, items):
    here, left_out = [], []
    untested = config.stash.setdefault(LEFT_OUT, Counter())
    for item in items:
        reason = next(filter(None, map(_absent, getattr(item, "fixturenames", ()))), None)
        if reason is None:
            here.append(item)
        else:
            left_out.append(item)
            untested[reason] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = here


@pytest.fixture(scope="session")
def smollm2():
    """The real model's file."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def assistant(smollm2):
    """The real model as users get it, drafting from the text."""
    return LLM("smollm2", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, max_model_len=512)


@pytest.fixture(scope="session")
def vocabulary():
    """llama.cpp's vocabularies, by name."""
    return lambda name: GGUFFile(vocabularies.folder() / f"ggml-vocab-{name}.gguf")


@pytest.fixture(scope="session")
def gemma():
    """The GGUF file."""
    return gemma_file.file()
