"""AWQ, GPTQ, compressed-tensors and FP8: checkpoints written here bit by bit, and dequantized here with numpy."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from damage import CONFIG, edit
from forerun import LLM, ConfigError, ModelError, SamplingParams
from forerun.measure.environment import logits
from forerun.models.files.open import Checkpoint
from forerun.models.formats import blocks, error
from forerun.models.load import load_model
from forerun.models.weights.layout import as_blocks
from forerun.models.weights.prequantized import Grouped, gather
from forerun.models.weights.transform import transform
from here import where
from refusals import refused
from tiny import save_checkpoint, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Parts = dict[str, np.ndarray | torch.Tensor]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs lies in the lowest four bits, and so on."""


def pack(levels, bits=4, places=None):
    """Levels [a, b] into int32 [a, b * bits / 32], the lowest bits first."""
    count = 32 // bits
    grouped = levels.astype(np.uint32).reshape(len(levels), -1, count)[..., list(places or range(count))]
    words = np.zeros(grouped.shape[:2], np.uint32)
    for index in range(count):
        words |= grouped[..., index] << np.uint32(bits * index)
    return words.view(np.int32)


def rounded(weight, group, bits=4, centred=False):
    """Levels [outputs, inputs], scales float16 as float32 and zeros [outputs, groups]."""
    top = 2**bits - 1
    parts = weight.reshape(len(weight), -1, group)
    if centred:
        scales = np.abs(parts).max(-1) / (top // 2)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
        scales = (high - low) / top
    scales = scales.astype(np.float16).astype(np.float32)
    if not centred:
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(int)
    levels = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, top).astype(int)
    return levels.reshape(weight.shape), scales, zeros


def values(levels, scales, zeros, groups):
    return (levels - zeros[:, groups]).astype(np.float32) * scales[:, groups]


def every(inputs, group):
    return np.arange(inputs) // group


def awq(weight, group):
    levels, scales, zeros = rounded(weight, group)
    parts = {"qweight": pack(levels.T, places=AWQ_PLACES), "qzeros": pack(zeros.T, places=AWQ_PLACES),
             "scales": scales.T.astype(np.float16)}  # fmt: skip
    return parts, values(levels, scales, zeros, every(weight.shape[1], group))


def gptq(weight, group, centred=True, shuffled=False, less=1):
    levels, scales, zeros = rounded(weight, group, centred=centred)
    groups = every(weight.shape[1], group)
    if shuffled:
        groups = np.random.default_rng(0).permutation(groups)
    parts = {"qweight": pack(levels).T, "qzeros": pack((zeros.T - less) & 15), "scales": scales.T.astype(np.float16),
             "g_idx": groups.astype(np.int32), "bias": np.zeros(len(weight), np.float16)}  # fmt: skip
    return parts, values(levels, scales, zeros, groups)


def compressed(weight, group, centred=True, bits=4):
    levels, scales, zeros = rounded(weight, group, bits, centred)
    parts = {"weight_packed": pack(levels, bits), "weight_scale": torch.from_numpy(scales),
                    "weight_shape": np.array(weight.shape)}  # fmt: skip
    if not centred:
        parts["weight_zero_point"] = pack(zeros.T, bits).T
    return parts, values(levels, scales, zeros, every(weight.shape[1], group))


def in_bytes(weight, group=None, centred=True):
    group = group or weight.shape[1]
    levels, scales, zeros = rounded(weight, group, 8, centred)
    parts = {"weight": (levels - 128).astype(np.int8), "weight_scale": scales}
    if not centred:
        parts["weight_zero_point"] = (zeros - 128).astype(np.int8)
    return parts, values(levels, scales, zeros, every(weight.shape[1], group))


def with_one_scale(weight):
    scale = np.array([abs(weight).max() / 127], np.float32)
    whole = np.rint(weight / scale).astype(np.int8)
    return {"weight": whole, "weight_scale": scale}, whole.astype(np.float32) * scale


def with_one_zero(weight):
    levels, scales, zeros = rounded(weight, weight.shape[1], 7, centred=True)
    parts = {"weight": (levels - zeros + 5).astype(np.int8), "weight_scale": scales, "weight_zero_point": np.array([5])}
    return parts, (levels - zeros).astype(np.float32) * scales


def fp8(weight, tile=32):
    rows, columns = -(-weight.shape[0] // tile), -(-weight.shape[1] // tile)
    scales = np.random.default_rng(1).uniform(0.01, 0.02, (rows, columns)).astype(np.float32)
    wide = np.repeat(np.repeat(scales, tile, 0), tile, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float().numpy() * wide


def scaled(weight, *shape):
    """FP8 with a scale for all, or one for each output."""
    scales = np.random.default_rng(1).uniform(0.01, 0.02, shape or (len(weight), 1)).astype(np.float32)
    numbers = torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float().numpy() * scales


def of_compressed(bits, format):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4}
CASES = {
    "awq, 32": (lambda w: awq(w, 32), {"quant_method": "awq", "bits": 4, "version": "gemm"}, "Q4_1"),
    "awq, 64": (lambda w: awq(w, 64), {"quant_method": "awq", "bits": 4, "group_size": 64}, "Q4_1"),
    "awq, 16": (lambda w: awq(w, 16), {"quant_method": "awq", "bits": 4, "group_size": 16}, "streamed"),
    "gptq": (lambda w: gptq(w, 32), GPTQ, "Q4_0"),
    "gptq, one group": (lambda w: gptq(w, w.shape[1]), GPTQ, "Q4_0"),
    "gptq, zeros": (lambda w: gptq(w, 64, centred=False), GPTQ, "Q4_1"),
    "gptq, v2": (lambda w: gptq(w, 32, False, less=0), {**GPTQ, "checkpoint_format": "gptq_v2"}, "Q4_1"),
    "gptq, act order": (lambda w: gptq(w, 32, shuffled=True), {**GPTQ, "desc_act": True}, "streamed"),
    "int4": (lambda w: compressed(w, 32), of_compressed(4, "pack-quantized"), "Q4_0"),
    "int4, zeros": (lambda w: compressed(w, 32, False), of_compressed(4, "pack-quantized"), "Q4_1"),
    "int8, groups": (lambda w: compressed(w, 32, bits=8), of_compressed(8, "pack-quantized"), "Q8_0"),
    "int8, packed": (lambda w: compressed(w, w.shape[1], bits=8), of_compressed(8, "pack-quantized"), "int8 by rows"),
    "int8": (in_bytes, of_compressed(8, "int-quantized"), "int8 by rows"),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}, "streamed"),
}  # fmt: skip
EVERY = {
    **CASES,
    "int8, bytes in groups": (lambda w: in_bytes(w, 32), of_compressed(8, "int-quantized"), "Q8_0"),
    "int8, zeros": (lambda w: in_bytes(w, centred=False), of_compressed(8, "int-quantized"), "streamed"),
    "int8, one scale": (with_one_scale, of_compressed(8, "int-quantized"), "int8 by rows"),
    "gptq, zeros of 0": (lambda w: gptq(abs(w), 64, centred=False), GPTQ, "Q4_1"),
    "int8, one zero": (with_one_zero, of_compressed(8, "int-quantized"), "streamed"),
    "fp8, by outputs": (scaled, of_compressed(8, "float-quantized"), "streamed"),
    "fp8, one scale": (lambda w: scaled(w, 1), {"quant_method": "fp8"}, "streamed"),
}


def write(folder, name):
    """A tiny Llama whose layers are quantized so, and what its weights stand for."""
    make, config, _ = EVERY[name]
    save_checkpoint(tiny_llama(hidden_size=64, intermediate_size=128, dtype="bfloat16").bfloat16(), folder)
    tensors = {}
    meant = {}
    for tensor, weight in load_file(folder / "model.safetensors").items():
        stem = tensor.removesuffix(".weight")
        if "_proj" not in stem:
            tensors[tensor] = meant[tensor] = weight
            continue
        parts, numbers = make(weight.float().numpy())
        for end, part in parts.items():
            given = part if isinstance(part, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(part))
            tensors[f"{stem}.{end}"] = given
        meant[tensor] = torch.from_numpy(numbers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(CONFIG, quantization_config=config)(folder)
    return meant


@pytest.mark.parametrize("name", EVERY)
def test_the_values_are_those_that_were_written(tmp_path, name):
    meant = write(tmp_path, name)
    result = transform(Checkpoint.at(tmp_path).files(packed=True), Checkpoint.at(tmp_path).config)
    for tensor, expected in meant.items():
        assert torch.equal(result.values(tensor)[:], expected), tensor
        assert torch.equal(result.values(tensor)[3:7], expected[3:7])


@pytest.mark.parametrize("name", where(blocks.can_run(), EVERY))
def test_the_layers_hold_them(tmp_path, name):
    """Exact, but for minima rounded to float16; the model's own error is that of inputs in 8 bits."""
    meant = write(tmp_path / "packed", name)
    path = EVERY[name][2]
    opened = Checkpoint.at(tmp_path / "packed")
    result = transform(opened.files(packed=True), opened.config)
    for tensor, expected in meant.items():
        held = as_blocks(result.values(tensor))
        if held is None:
            assert path == "streamed" or "_proj" not in tensor
            continue
        got = held.values() if path.startswith("Q") else held.levels * held.scales[:, None]
        assert torch.allclose(got, expected, rtol=0, atol=0 if path != "Q4_1" else 2e-3 * expected.abs().max())
    model = load_model(tmp_path / "packed", invariant=True)
    assert path in model.info.path
    shutil.copytree(tmp_path / "packed", tmp_path / "plain")
    save_file(meant, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    edit(CONFIG, quantization_config=None)(tmp_path / "plain")
    exact = load_model(tmp_path / "plain", dtype="float32", invariant=False)
    texts = [[5, 9, 12, 40, 33, 7, 21, 60]]
    assert error(logits(exact, texts), logits(model, texts)) < 0.05
    numbers = load_model(tmp_path / "packed", quantization="float32", invariant=False)
    assert error(logits(exact, texts), logits(numbers, texts)) < 1e-5


@pytest.mark.parametrize("scale", [1e5, 1e-9])
def test_scales_that_are_no_float16_stay_as_they_are(scale):
    levels = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
    weight = Grouped((2, 32), 4, lambda: (levels, torch.full((2, 1), 8)), torch.full((2, 1), scale))
    assert weight.blocks() is None
    assert torch.equal(weight[:], (levels.float() - 8) * scale)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_is_left_out_where_it_adds_nothing(value):
    parts, _ = gptq(np.random.default_rng(0).normal(size=(16, 32)), 32)
    tensors = {f"a.{end}": torch.from_numpy(np.ascontiguousarray(part)) for end, part in parts.items()}
    tensors["a.bias"] = torch.full((16,), value)
    assert ("a.bias" in gather(tensors, GPTQ, "it")) == (value != 0)


def test_rows_and_inputs_that_do_not_fill_their_words():
    levels, scales, zeros = rounded(np.random.default_rng(0).normal(size=(12, 60)), 30)
    wide = [np.pad(each, ((0, 0), (0, 4)), constant_values=9) for each in (levels, zeros.T)]
    parts = {"packed": pack(wide[0]), "scale": scales, "shape": np.array([12, 60]), "zero_point": pack(wide[1]).T}
    tensors = {f"a.weight_{end}": torch.from_numpy(np.ascontiguousarray(part)) for end, part in parts.items()}
    result = gather(tensors, of_compressed(4, "pack-quantized"), "it")["a.weight"][:]
    assert torch.equal(result, torch.from_numpy(values(levels, scales, zeros, every(60, 30))))


@pytest.mark.parametrize("name", ["awq, 32", "fp8"])
def test_they_generate_and_may_be_rounded_again(tmp_path, name):
    write(tmp_path, name)
    llm = LLM(str(tmp_path), speculative_config={"method": "ngram"})
    drafted = llm.generate("the cat the cat", GREEDY)[0].outputs[0].token_ids
    assert drafted == llm.generate("the cat the cat", GREEDY, speculate=False)[0].outputs[0].token_ids
    if blocks.can_run():
        assert "Q8_0" in load_model(tmp_path, quantization="q8_0").info.path
    refused(ModelError, "which only the native path reads", load_model, tmp_path, model_path="hf")


BAD = {
    "awq of 8 bits": ("awq, 32", {"bits": 8}, None, r"AWQ \(8 bits\), of which only 4 bits are read"),
    "another awq": ("awq, 32", {"version": "gemv"}, None, "of version 'gemv', of which only gemm is read"),
    "another gptq": ("gptq", {"checkpoint_format": "marlin"}, None, "in the format 'marlin'"),
    "sparse": ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, None, "and sparse, which"),
    "another format": ("int4", {"format": "nvfp4-pack-quantized"}, None, "in the format 'nvfp4-pack-quantized'"),
    "3 bits": ("int4", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, None, r"weights of \[3\] bits"),
    "transformed": ("int4", {"transform_config": {"config_groups": {"a": {}}}}, None, "in the format 'pack-quantized'"),
    "no scales": ("awq, 32", {}, {"scales": None}, "lacks .*proj.scales, a part of a AWQ weight"),
    "scales of another shape": ("gptq", {}, {"scales": torch.ones(2, 3).half()}, r"a part of it is \[2, 3\]"),
    "three groups": ("awq, 32", {}, {"scales": torch.ones(3, 64).half()}, "64 inputs in 3 groups"),
    "groups that there are not": ("gptq", {}, {"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "names groups"),
    "another shape": ("int4", {}, {"weight_shape": torch.tensor([64, 48])}, "a part of it is"),
    "no such weights": ("fp8", {"quant_method": "awq"}, None, "holds no AWQ weights, though its config says so"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_line(tmp_path, name):
    case, config, parts, message = BAD[name]
    write(tmp_path, case)
    given = json.loads((tmp_path / "config.json").read_text())
    given["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(given))
    tensors = load_file(tmp_path / "model.safetensors")
    for end, part in (parts or {}).items():
        stem = "model.layers.0.self_attn.q_proj"
        tensors.pop(f"{stem}.{end}")
        tensors |= {} if part is None else {f"{stem}.{end}": part}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused((ModelError, ConfigError), message, LLM, str(tmp_path))
