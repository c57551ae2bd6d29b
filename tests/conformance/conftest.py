import shlex
from functools import cache
from pathlib import Path

import pytest
from harness import LONGEST, SETS, answers, run
from matrix import SHAPES, additions
from table import PROPERTY, markdown

from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.models.load import load_model
from forerun.models.text.tokenizer import load_tokenizer
from forerun.speculate.draft import drafters
from tiny import WIDE, save_checkpoint, tiny_llama

COLLECTED = pytest.StashKey[int]()


@pytest.fixture(scope="session", autouse=True)
def parts():
    with additions():
        yield


@pytest.fixture(scope="session")
def wide_target(tmp_path_factory):
    """Folder of a ``tiny_target`` with heads that the attention kernel does not serve; few, as they are wide."""
    model = tiny_llama(head_dim=WIDE, num_attention_heads=2, num_key_value_heads=1)
    return save_checkpoint(model, tmp_path_factory.mktemp("wide_target"))


@pytest.fixture(scope="session")
def engine(tiny_target):
    """``engine(speculative_config=None, path="native", model=None, **options)``: a fresh engine on a shared model,
    ``tiny_target`` or that of another folder with its tokenizer."""
    models = {}
    tokenizer = load_tokenizer(tiny_target)

    def build(config=None, path="native", model=None, **options):
        folder = model or tiny_target
        if (folder, path) not in models:
            models[folder, path] = load_model(folder, invariant=True, model_path=path)
        engine_config = EngineConfig(model=folder, model_path=path, **{"max_model_len": LONGEST, **options})
        return Engine(models[folder, path], tokenizer, engine_config, SpeculativeConfig.parse_all(config))

    return build


@pytest.fixture(scope="session")
def keys(tiny_target, tiny_draft, tmp_path_factory):
    """``keys(case, **more)``: a ``speculative_config`` of the case's drafter for the tiny target."""
    examples = {}

    def build(case, **more):
        if case.method not in examples:
            folder = tmp_path_factory.mktemp(case.method)
            examples[case.method] = drafters[case.method].example(Path(tiny_target), folder)
            if case.method == "draft_model":
                examples[case.method] = {"model": tiny_draft}  # unlike the target itself, it is sometimes wrong
        result = {"method": case.method, **examples[case.method], **SHAPES[case.shape], **more}
        if case.method == "draft_model" and not {"tree", "tree_nodes"} & set(result):
            result.setdefault("num_speculative_tokens", 3)  # by itself it would draft as far as that pays
        return result

    return build


@pytest.fixture(scope="session")
def plain(engine):
    """``plain(path="native", which="all")``: the answers of decoding one token, and one request, at a time."""

    @cache
    def get(path="native", which="all"):
        return answers(run(engine(path=path, max_num_seqs=1), SETS[which]))

    return get


def pytest_itemcollected(item):
    """A case of the matrix carries its place there to the table."""
    combination = getattr(item, "callspec", None) and item.callspec.params.get("combination")
    if combination is not None:
        item.user_properties.append((PROPERTY, tuple(combination)))


def pytest_collection_finish(session):
    session.config.stash[COLLECTED] = len(session.items)


def pytest_terminal_summary(terminalreporter, config):
    file = config.getoption("--conformance-table")
    if file is not None and not hasattr(config, "workerinput"):
        command = shlex.join(["pytest", *config.invocation_params.args])
        known = {report.nodeid for reports in terminalreporter.stats.values() for report in reports if report}
        text = markdown(terminalreporter.stats, command, config.stash.get(COLLECTED, len(known)))
        Path(file).write_text(text, encoding="utf-8")
