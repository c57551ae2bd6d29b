"""Models out of GGUF files: a Llama there and back, weights as they lie, and files that hold something else."""

import random

import pytest
import torch
from gguf import GGMLQuantizationType as Kinds

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, ForerunError, ModelError
from forerun.measure.environment import logits
from forerun.models.architectures.families import LLAMA
from forerun.models.files.gguf import GGUFFile
from forerun.models.files.open import Checkpoint
from forerun.models.formats import blocks, error
from forerun.models.kinds import BLOCKS
from forerun.models.run.hf import read_module
from forerun.speculate.draft import drafters
from forerun_lab.shapes import random_checkpoint
from gguf_files import TOKENS, VOCABULARY, write_model
from here import where
from refusals import refused

EXPERTS = {"llama.expert_count": 4, "llama.expert_used_count": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MIXED = {"attn_v": Kinds.Q6_K, "ffn_down": Kinds.Q5_K, "token_embd": Kinds.Q6_K, "attn_output": Kinds.F16}
PACKED = where(
    blocks.can_run(),
    [
        ({}, 32, "Q4_1 and Q8_0"),
        ({"blk": Kinds.Q4_0, "token": Kinds.F16}, 32, "Q4_0 and streamed bfloat16"),
        ({"blk": Kinds.Q5_0, "token": Kinds.Q5_1}, 32, "Q5_0 and Q5_1"),
        (MIXED | {"blk": Kinds.Q4_K}, 256, None),
    ],
)


QUANTIZED = where(blocks.can_run(), [(kind, kind.upper()) for kind in BLOCKS])


def test_a_file_is_a_whole_model(tmp_path):
    llm = LLM(str(write_model(tmp_path / "model.gguf", {"tokenizer.ggml.eot_token_id": 2})))
    tokenizer = llm.tokenizer
    assert tokenizer.model_max_length == 128
    text = tokenizer.apply_chat_template([{"content": "the"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>the<|end|><|start|>"
    assert llm.model.info.dtype == torch.bfloat16
    assert llm.model.info.eos_ids == {0, 2}
    expected = llm.generate(["the 12"], GREEDY)[0].outputs[0].token_ids
    assert len(expected) == 12
    assert LLM(str(tmp_path)).generate(["the 12"], GREEDY)[0].outputs[0].token_ids == expected  # the folder


@pytest.mark.parametrize(("kinds", "width", "layout"), PACKED)
def test_packed_weights_stay_as_they_are(tmp_path, kinds, width, layout):
    """Text, bytes held and error against the same weights dequantized; drafts change nothing."""
    path = write_model(tmp_path / "model.gguf", kinds=kinds, width=width)
    llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    info = llm.model.info
    assert llm.model.fused is not None
    assert layout is None or info.path == f"native, {layout}"
    exact = read_module(Checkpoint.at(path), torch.float32, attention=None)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    drafted, plain = (llm.generate(["the 12 the 12"], params, speculate=expected)[0] for expected in (True, False))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.num_draft_tokens > 0
    ids = plain.prompt_token_ids
    with torch.inference_mode():
        expected = exact(torch.tensor([ids])).logits[0]
    off = error(expected, logits(llm.model, [ids]))
    assert off < 0.04
    numbers = LLM(str(path), quantization="bfloat16")
    assert numbers.model.info.path.startswith("native, ")
    assert numbers.model.info.weight_bytes > 1.7 * info.weight_bytes


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa", "layerskip", "lookahead"])
def test_drafters_of_every_sort_know_packed_targets(tmp_path, method):
    path = write_model(tmp_path / "model.gguf", kinds={"attn_v": Kinds.Q8_0})
    options = drafters[method].example(path, tmp_path / "head")
    llm = LLM(str(path), speculative_config={"method": method, "num_speculative_tokens": 3, **options})
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
        drafted, plain = (llm.generate(["the 12 the"], params, speculate=expected)[0] for expected in (True, False))
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert drafted.metrics.draft_error is None
        assert drafted.metrics.num_draft_tokens > 0
        if method == "draft_model":
            assert drafted.metrics.num_accepted_draft_tokens == drafted.metrics.num_draft_tokens


@pytest.mark.parametrize(("quantization", "layout"), QUANTIZED)
def test_checkpoints_are_quantized_while_they_are_loaded(tmp_path, quantization, layout):
    folder = random_checkpoint(tmp_path / "tiny", "tiny", vocabulary=120)
    expected, llm = LLM(str(folder), dtype="float32"), LLM(str(folder), dtype="float32", quantization=quantization)
    assert llm.model.info.path == f"native, {layout}"
    ids = [[*range(3, 40)]]
    off = error(logits(expected.model, ids), logits(llm.model, ids))
    assert off < {"q4": 0.25, "q5": 0.12, "q8": 0.05}[quantization[:2]]
    assert llm.engine.identity


def test_a_dtype_as_quantization_is_that_dtype(tmp_path):
    path = write_model(tmp_path / "model.gguf")
    for name in ("bfloat16", "float32"):
        llm = LLM(str(path), quantization=name)
        assert str(llm.model.info.dtype) == f"torch.{name}"
        assert llm.model.info.quantization is None
        assert llm.model.info.path.endswith(name)
    with pytest.raises(ConfigError, match="remove dtype or set it to"):
        LLM(str(path), quantization="bfloat16", dtype="float32")
    drafted = LLM(str(path), speculative_config={"model": str(path), "num_speculative_tokens": 2,
                                                 "quantization": "float32"})  # fmt: skip
    assert drafted.engine.router.drafters["draft_model"].model.info.dtype == torch.float32


@pytest.mark.parametrize(("model_path", "weights"), [("hf", "auto"), ("native", "plain")])
def test_without_kernels_weights_are_dequantized(tmp_path, model_path, weights):
    path = write_model(tmp_path / "model.gguf")
    exact = read_module(Checkpoint.at(path), torch.float32, attention=None)
    llm = LLM(str(path), model_path=model_path, weights=weights, dtype="float32")
    assert llm.model.info.path.startswith(f"{model_path}, plain" if weights == "plain" else model_path)
    expected = exact.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    result = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0].outputs[0].token_ids
    assert result == expected[0, 3:].tolist()


def test_types_that_are_not_served_are_named_with_those_that_are(tmp_path):
    path = write_model(tmp_path / "model.gguf", kinds={"attn_v": Kinds.Q1_0}, width=256)
    said = str(refused(ModelError, None, LLM, str(path)))
    assert "blk.0.attn_v.weight is of type Q1_0; F32, F16, BF16, Q4_0, Q4_1, Q4_K, Q5_0" in said
    assert "Q6_K, Q8_0, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, IQ3_S" in said
    assert "TQ2_0, NVFP4 are read" in said


@pytest.mark.parametrize("path", ["native", "hf"])
def test_parts_that_read_pictures_and_sound_are_left_out(tmp_path, caplog, path):
    options = {"model_path": path, "dtype": "float32", "speculative_config": None}
    names = ("v.blk.0.attn_q.weight", "v.patch_embd.weight", "mm.0.weight", "a.blk.0.attn_q.weight")
    extra = {**dict.fromkeys(names, (8, 32)), "mtp.fc.weight": (32, 64)}
    with caplog.at_level("INFO", logger="forerun"):
        plain = LLM(str(write_model(tmp_path / "plain.gguf")), **options)
        assert "left out" not in caplog.text
        whole = LLM(str(write_model(tmp_path / "whole.gguf", extra=extra)), **options)
    assert "whole.gguf also reads pictures or sound: that part is left out" in caplog.text
    ids = [[5, 6, 7, 8]]
    assert torch.equal(logits(whole.model, ids), logits(plain.model, ids))


@pytest.mark.parametrize("name", ["sha256-8daa", "model.bin", "model"])
def test_a_file_is_known_by_its_first_bytes(tmp_path, name):
    """As Ollama's and Docker's stores name them."""
    path = write_model(tmp_path / "model.gguf")
    expected = LLM(str(path)).generate(["the 12"], GREEDY)[0].outputs[0].token_ids
    assert LLM(str(path.rename(tmp_path / name))).generate(["the 12"], GREEDY)[0].outputs[0].token_ids == expected
    (tmp_path / "other").write_bytes(b"PK\x03\x04 no model")
    refused(ModelError, "no checkpoint folder at .*other", LLM, str(tmp_path / "other"))


def test_no_damaged_byte_makes_anything_but_an_error_or_a_model(tmp_path):
    whole = write_model(tmp_path / "model.gguf").read_bytes()
    header = min(tensor.start for tensor in GGUFFile(tmp_path / "model.gguf").tensors.values())
    path, chance, outcomes = tmp_path / "damaged.gguf", random.Random(0), set()
    for _ in range(60):
        index = chance.randrange(header)
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1 << chance.randrange(8)]) + whole[index + 1 :])
        try:
            LLM(str(path), invariant=False).generate({"prompt_token_ids": [3, 4]}, GREEDY)
            outcomes.add("a model")
        except ForerunError as error:
            said = str(error).replace(str(path), "")
            outcomes.add("a short line" if "\n" not in said and len(said) < 500 else said)
    assert outcomes == {"a model", "a short line"}


@pytest.mark.parametrize(("changes", "extra", "message"), [
    ({"general.architecture": "mamba"}, None, r"architecture 'mamba'; only .*llama.* are read from GGUF"),
    ({"llama.block_count": None}, None, "None as llama.block_count"),
    ({"llama.attention.head_count": [4, 4]}, None, r"\[4, 4\] as llama.attention.head_count"),
    ({"llama.expert_count": 8}, None, "None as llama.expert_used_count"),
    (EXPERTS, None, "a tensor blk.0.ffn_gate.weight, which its metadata leave out"),
    (EXPERTS, {"blk.0.ffn_gate_exps.weight": (3, 64, 32)}, r"shape \[3, 64, 32\].* leave out|which its metadata"),
    ({"llama.rope.scaling.type": "yarn"}, None, "None as llama.rope.scaling.original_context_length"),
    ({}, {"rope_freqs.weight": (4,)}, "divides its rotary frequencies .* in another way than Llama 3"),
    ({"llama.rope.dimension_count": 4}, None, "heads of 8 numbers, but 4"),
    ({"llama.attention.head_count": 32}, None, "heads of 1 numbers"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, None, "0.0 as llama.attention.layer_norm_rms_epsilon"),
    ({"llama.attention.head_count": 2}, None, "blk.0.attn_q.weight has shape|blk.0.attn_k.weight has shape"),
    ({}, {"blk.0.attn_q.bias": (32,)}, "a tensor blk.0.attn_q.bias, which its metadata leave out"),
    ({"tokenizer.ggml.eot_token_id": 999}, None, "999 as tokenizer.ggml.eot_token_id"),
    ({"llama.block_count": 3}, None, "lacks 9 weights, model.layers.2.self_attn.q_proj.weight among them"),
    ({"llama.block_count": 1 << 30}, None, "has 1073741824 layers in 20 tensors"),
    ({"llama.feed_forward_length": 1 << 31}, None, "intermediate_size must be an integer"),
    ({"llama.feed_forward_length": 1 << 20}, None, "intermediate_size is 1048576, but there are"),
    ({"llama.embedding_length": 64}, None, r"token_embd.weight has shape \[50, 32\].* ask for \[50, 64\]"),
])  # fmt: skip
def test_what_is_not_read_is_named(tmp_path, changes, extra, message):
    path = write_model(tmp_path / "model.gguf", changes, extra)
    refused((ModelError, ConfigError), message, LLM, str(path), invariant=False)


def test_names_of_weights_have_one_form():
    assert LLAMA.checkpoint_names("blk.11.ffn_down.weight") == ("model.layers.11.mlp.down_proj.weight",)
    for name in ("blk.x.ffn_down.weight", "blk..ffn_down.weight", "blk.1.ffn_down", "ffn_down.weight", "blk.1.weight"):
        assert LLAMA.checkpoint_names(name) == ()


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"]
)
def test_ends_of_turns_are_known_by_their_text(tmp_path, end):
    """Of Gemma 3, Phi-3 and Qwen2.5-Coder, files name one end and tokenizers have several."""
    tokens = [end if token == "<tool>" else token for token in TOKENS]
    llm = LLM(str(write_model(tmp_path / "model.gguf", {"tokenizer.ggml.tokens": tokens})))
    assert llm.model.info.eos_ids == {0, tokens.index(end)}
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={tokens.index(end): 1000.0})
    answer = llm.chat([{"role": "user", "content": "the"}], params)[0].outputs[0]
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("", "stop", 1)


@pytest.mark.parametrize(("keys", "factor"), [
    ({"scaling.factor": 4.0}, 4.0),
    ({"scale_linear": 4.0}, 4.0),
    ({"scaling.type": "linear", "scale_linear": 4.0}, 4.0),
    ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2.0),
    ({"scaling.type": "none", "scaling.factor": 4.0}, None),
    ({"scaling.type": "linear"}, None),
    ({"scaling.factor": 1.0}, None),
    ({"scaling.factor": 0.0}, None),
])  # fmt: skip
def test_linear_scaling_is_read_as_llama_cpp_does(tmp_path, keys, factor):
    path = write_model(tmp_path / "model.gguf", {f"llama.rope.{key}": value for key, value in keys.items()})
    result = Checkpoint.at(path).transformers_config().rope_parameters
    assert result["rope_type"] == ("default" if factor is None else "linear")
    assert result.get("factor") == factor


def test_a_padding_id_that_nothing_uses_refuses_no_model(tmp_path):
    path = write_model(tmp_path / "model.gguf", {"tokenizer.ggml.padding_token_id": 2**32 - 1})
    assert len(LLM(str(path)).generate(["the 12"], GREEDY)[0].outputs[0].token_ids) == 12


def test_twins_and_empty_tokens_refuse_no_model_and_no_grammar(tmp_path):
    tokens = [*TOKENS]
    empty, twin = tokens.index("<tool>"), tokens.index("z")
    tokens[empty], tokens[twin] = "", "a"
    kinds = [1 if index == empty else kind for index, kind in enumerate(VOCABULARY["tokenizer.ggml.token_type"])]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    llm = LLM(str(write_model(tmp_path / "model.gguf", changes)))
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={twin: 1000.0})
    assert llm.generate(["the"], params)[0].outputs[0].text == "aaa"
    chosen = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"choice": ["the cab", "abba"]})
    assert llm.generate(["the"], chosen)[0].outputs[0].text in ("the cab", "abba")
