"""What people bring from vLLM: keywords, keys, fields; each means the same here, or is answered with what to do."""

from pathlib import Path

import pytest
import torch

from forerun import LLM, ConfigError, ForerunError, ModelError, SamplingParams, SpeculativeConfig
from forerun.engine import memory
from forerun.engine.config import EngineConfig
from forerun.engine.llm import INSTEAD, WITHOUT_EFFECT, engine_options
from forerun.models.files.open import resolve
from refusals import refused

COLD = SamplingParams(temperature=0.0, max_tokens=6)


def test_what_is_so_anyway_is_accepted_and_changes_nothing(llm, tiny_target):
    habits = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enforce_eager": True, "trust_remote_code": False,
        "swap_space": 0, "kv_cache_dtype": "auto", "dtype": "auto", "seed": 0, "max_model_len": 128, "max_num_seqs": 4,
    }  # fmt: skip
    model = LLM(tiny_target, **habits)
    assert model.generate("the cat", COLD)[0].outputs[0] == llm().generate("the cat", COLD)[0].outputs[0]
    assert set(habits) & set(WITHOUT_EFFECT) == {
        "pipeline_parallel_size", "trust_remote_code", "swap_space", "kv_cache_dtype"
    }  # fmt: skip
    assert engine_options({name: accepted[0] for name, (accepted, _) in WITHOUT_EFFECT.items()}) == {}


def test_objects_stand_for_their_names(llm, tiny_target):
    expected = llm().generate("the cat", COLD)[0].outputs[0]
    for habits in (
        {"dtype": torch.float32, "device": torch.device("cpu")},
        {"dtype": None},
        {"tokenizer": Path(tiny_target)},
    ):
        assert LLM(tiny_target, **habits).generate("the cat", COLD)[0].outputs[0] == expected
    for habits in ({"dtype": 32}, {"device": []}, {"max_num_seqs": None}):
        refused(ConfigError, "must be", LLM, tiny_target, **habits)


@pytest.mark.parametrize("name", sorted({*WITHOUT_EFFECT, *INSTEAD}))
def test_what_cannot_be_honoured_is_one_line_that_says_what_to_do(name):
    error = refused(ConfigError, name, LLM, **{name: "anything else"})
    hint = WITHOUT_EFFECT[name][1] if name in WITHOUT_EFFECT else INSTEAD[name]
    assert hint in str(error)


def test_true_is_not_one():
    refused(ConfigError, "pipeline_parallel_size=True", engine_options, {"pipeline_parallel_size": True})
    with pytest.raises(ConfigError, match="tensor_parallel_size must be an integer of at least 1, not True"):
        EngineConfig(tensor_parallel_size=True)


def test_other_names_of_our_options():
    assert engine_options({"block_size": 32, "enable_prefix_caching": False}) == {
        "page_size": 32,
        "prefix_caching": False,
    }
    assert engine_options({"enable_prefix_caching": True}) == {"page_size": 16, "prefix_caching": True}
    assert engine_options({"enable_prefix_caching": True, "block_size": 8})["page_size"] == 8
    assert engine_options({"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 5}) == {
        "num_pages": 9,
        "kv_cache_memory": 5,
    }
    refused(ConfigError, "page_size is set twice", engine_options, {"block_size": 32, "page_size": 16})


def test_prefix_caching_by_its_name_there(tiny_target):
    model = LLM(tiny_target, enable_prefix_caching=True)
    ids = model.tokenizer.encode("the cat sat on the mat; " * 4)
    cached = [model.generate([ids], COLD)[0].metrics.num_cached_tokens for _ in range(2)]
    assert cached == [0, len(ids) - 1]


def test_a_revision_and_a_folder_reach_the_download(monkeypatch, tiny_target, tmp_path):
    asked = []

    def download(index, revision, cache):
        asked.append((index.repository, revision, cache))
        return Path(tiny_target)

    monkeypatch.setattr("forerun.models.files.hub.download", download)
    result = engine_options({"model": "someone/something", "revision": "v2", "download_dir": str(tmp_path)})
    assert result == {"model": tiny_target}
    assert asked == [("someone/something", "v2", str(tmp_path))]
    for here in (tiny_target, "forerun:target"):
        refused(ConfigError, "remove them", LLM, here, revision="main")
    refused(ModelError, "no checkpoint folder", resolve, "/no/such/folder", revision="main")


def test_a_share_of_the_gpus_memory(monkeypatch, tiny_target):
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    gpu = torch.device("cuda")
    assert memory.budget(None, 0.9, gpu) == 50  # 40 of 100 are in use
    assert memory.budget(None, 0.3, gpu) == 0
    assert memory.budget(7, None, gpu) == 7
    with pytest.warns(RuntimeWarning, match="use kv_cache_memory"):
        LLM(tiny_target, device="cpu", gpu_memory_utilization=0.9)
    for wrong in ({"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 0.9, "kv_cache_memory": "1GiB"}):
        refused(ConfigError, "gpu_memory_utilization", LLM, tiny_target, **wrong)


def test_methods_and_keys_of_speculation():
    given = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    config = SpeculativeConfig.parse({"method": "ngram", **given})
    assert config == SpeculativeConfig.parse({"method": "prompt_lookup", **given})
    assert config.method == "prompt_lookup"
    assert SpeculativeConfig.parse({"method": "ngram"}).method == "ngram"
    eagle = {"model": "heads", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    assert SpeculativeConfig.parse({"method": "eagle3", **eagle}) == SpeculativeConfig.parse(
        {"method": "eagle", "model": "heads", "num_speculative_tokens": 3}
    )


def test_outputs_have_the_fields_that_code_for_vllm_reads(llm):
    outputs = llm({"method": "ngram"}).generate(["the cat", "a dog"], COLD.clone(n=2))
    ids = [output.request_id for output in outputs]
    assert all(isinstance(each, str) for each in ids)
    assert len(set(ids)) == 2
    assert all(output.finished for output in outputs)
    assert outputs[0].outputs[0].cumulative_logprob is None
    assert outputs[0].outputs[0].logprobs is None


def test_lower_priorities_are_answered_first(tiny_target):
    model = LLM(tiny_target, max_num_seqs=1)
    ended = []

    def see(update):
        if update.finish is not None:
            ended.append(update.job.sequence.num_prompt)

    model.generate([[5] * 3, [5] * 4, [5] * 5], COLD, priority=[2, 0, 1], on_update=see)
    assert ended == [4, 5, 3]
    for wrong in ([1], [1, 2, "x"], 3):
        with pytest.raises(ForerunError, match="priority must list one integer for each of the 3 prompts"):
            model.generate([[5]] * 3, COLD, priority=wrong)
