from functools import cache
from pathlib import Path

import pytest
from matrix import SHAPES, additions

from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.models.load import load_model
from forerun.models.text.tokenizer import load_tokenizer
from forerun.speculate.draft import drafters
from harness import LONGEST, SETS, answers, run
from tiny import WIDE, save_checkpoint, tiny_llama


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
    """``keys(case, target=None, **more)``: a ``speculative_config`` of the case's drafter for the tiny target, whose
    draft model is sometimes wrong, or for another one, which drafts for itself."""
    examples = {}

    def build(case, target=None, **more):
        key = target, case.method
        if key not in examples:
            made = drafters[case.method].example(Path(target or tiny_target), tmp_path_factory.mktemp(case.method))
            examples[key] = {"model": tiny_draft} if key == (None, "draft_model") else made
        result = {"method": case.method, **examples[key], **SHAPES[case.shape], **more}
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
