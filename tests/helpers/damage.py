"""Ways to damage a checkpoint's folder, one at a time: what a download, a disk, a converter or an attacker leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]
CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def edit(file, **fields):
    """Set fields of a JSON file; a name with a dot goes one level down."""

    def damage(folder):
        content = json.loads((folder / file).read_text())
        for name, value in fields.items():
            inner, _, last = name.rpartition("__")
            (content[inner] if inner else content)[last] = value
        (folder / file).write_text(json.dumps(content))

    return damage


def replace(file, content):
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def weights(change):
    """Change the tensors of ``model.safetensors``."""

    def damage(folder):
        result = load_file(folder / WEIGHTS)
        change(result)
        save_file(result, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def header(change):
    """Change what ``model.safetensors`` says of its tensors, and not the tensors."""

    def damage(folder):
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        result = json.loads(content[8:end])
        change(result)
        fresh = json.dumps(result).encode()
        (folder / WEIGHTS).write_bytes(len(fresh).to_bytes(8, "little") + fresh + content[end:])

    return damage


def index(places, metadata=...):
    """An index in place of the one file, which becomes ``part.safetensors``."""

    def damage(folder):
        names = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        result = dict.fromkeys(names, places) if isinstance(places, str) else places
        content = {"metadata": {} if metadata is ... else metadata, "weight_map": result}
        (folder / (WEIGHTS + ".index.json")).write_text(json.dumps(content))

    return damage


def without(*files):
    return lambda folder: [(folder / file).unlink() for file in files]


def together(*damages):
    return lambda folder: [damage(folder) for damage in damages]


NOT_OBJECTS = {
    "null": "null", "a list": "[]", "a number": "3", "text": '"a"', "half an object": "{", "nothing": "",
    "no text": b"\xff\xfe\x00", "deep": "[" * 100_000, "long number": '{"a":' + "9" * 5000 + "}",
}  # fmt: skip
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size",
)  # fmt: skip
ODD = (0, -1, 1, 7, "32", 3.5, True, [], {}, 2**31, 2**63, 10**30, float("nan"))
FIELDS = {
    **dict.fromkeys(SIZES, ODD),
    "max_position_embeddings": (0, -1, 1, 2, 3, 31, "32", 3.5, True, [], {}, 2**63),
    "rms_norm_eps": ("x", -1.0, float("nan"), float("inf"), True, [], None),
    "hidden_act": (3, "nope", None, {}),
    "architectures": (3, [3], "LlamaForCausalLM", {}),
    "model_type": (3, None, "telepath", [], "clip", "t5"),
    "dtype": ("float31", "int8", "float64", "potato", 3, {}),
    "pad_token_id": (98, 1000, -5, "x", 1.5),
    "eos_token_id": ("a", [0, "x"], 3.5, {}, [[0]], True),
    "tie_word_embeddings": ("x", 3),
    "attention_bias": (3, "x", True),
    "mlp_bias": (1, True),
    "rope_parameters": (
        "x", [], 3, {"rope_type": "x"}, {"rope_type": 3}, {"rope_type": []}, {"rope_theta": "x"}, {"rope_theta": 0},
        {"rope_theta": -5}, {"rope_theta": True}, {"rope_type": "linear", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 0},
        {"rope_type": "llama3", "rope_theta": 1e4}, {"rope_type": "yarn", "rope_theta": 1e4, "factor": float("nan")},
    ),
    "id2label": (3,),
    "text_config": (3,),
    "configuration_files": (["config.4.0.0.json"], ["../config.4.0.0.json"]),
    "transformers_weights": ("weights.bin", "adapter_model.bin", "part.safetensors", 3),
}  # fmt: skip
SCHEMES = {
    "AWQ (4 bits)": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "GPTQ (4 bits)": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "bitsandbytes (4 bits)": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes (8 bits)": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}, "format": "pack-quantized"},
    "MXFP4": {"quant_method": "mxfp4"},
    "an unknown scheme": {"bits": "x"},
    "an unknown scheme ('awq')": "awq",
}
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
BAD_SPLIT = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
TEMPLATE = {
    "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [],
    "special_tokens": {},
}  # fmt: skip
TOKENIZERS = {
    "model": (
        3, {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "c"]]},
    ),
    "model__vocab": ({"a": -1}, [], None),
    "pre_tokenizer": (3, BAD_SPLIT),
    "normalizer": (3, {"type": "Nope"}),
    "decoder": (3, {"type": "Nope"}),
    "post_processor": (3, TEMPLATE),
    "added_tokens": (3, [3], [{"id": -1, "content": "x"}]),
    "version": (7,),
}  # fmt: skip
TOKENIZER_FIELDS = {
    "eos_token": (3, []), "model_max_length": ("x",), "chat_template": (3, [3]), "extra_special_tokens": (3,),
    "added_tokens_decoder": (3,),
}  # fmt: skip
QUERY = "model.layers.0.self_attn.q_proj.weight"
SOME = "model.layers.1.mlp.up_proj.weight"
ALONE = json.dumps({"tokenizer_class": "LlamaTokenizer"})
FOREIGN = json.dumps({"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})


def _named(file, fields):
    def short(value):
        return repr(value)[:40]

    return {
        f"{file}: {name} is {short(value)}": edit(file, **{name: value})
        for name, values in fields.items()
        for value in values
    }


def _tensors():
    def grow(result):
        result["model.layers.2.mlp.up_proj.weight"] = result[SOME].clone()

    return {
        "a tensor is missing": weights(lambda result: result.pop(SOME)),
        "a tensor has another shape": weights(lambda result: result.update({SOME: result[SOME][:-1].clone()})),
        "a tensor has one dimension more": weights(lambda result: result.update({SOME: result[SOME][None].clone()})),
        "a tensor is empty": weights(lambda result: result.update({SOME: torch.empty(0)})),
        "a tensor holds integers": weights(lambda result: result.update({SOME: result[SOME].to(torch.int8)})),
        "a tensor holds float8": weights(lambda result: result.update({SOME: result[SOME].to(torch.float8_e4m3fn)})),
        "a tensor holds complex numbers": weights(
            lambda result: result.update({SOME: result[SOME].to(torch.complex64)})
        ),
        "a layer that the config leaves out": weights(grow),
        "a bias that the config leaves out": weights(
            lambda result: result.update({QUERY.replace("weight", "bias"): torch.ones(64)})
        ),
        "quantized tensors that no config mentions": weights(
            lambda result: result.update({SOME.replace("weight", "qweight"): torch.ones(4, dtype=torch.int32)})
        ),
        "no tensors": weights(lambda result: result.clear()),
        "other tensors": weights(lambda result: (result.clear(), result.update({"weight": torch.ones(3)}))),
    }


def _headers():
    def swap(result):
        result[SOME]["data_offsets"] = result[QUERY]["data_offsets"]

    def says(**fields):
        return header(lambda result: result[SOME].update(fields))

    return {
        "offsets behind the end": says(data_offsets=[0, 10**9]),
        "offsets backwards": says(data_offsets=[800, 0]),
        "offsets of another tensor": header(swap),
        "negative offsets": says(data_offsets=[-8, 0]),
        "a shape larger than the data": says(shape=[64, 33]),
        "a negative shape": says(shape=[-64, -32]),
        "a shape that overflows": says(shape=[2**62, 4]),
        "an unknown kind of numbers": says(dtype="Q4"),
        "another kind of numbers": says(dtype="I32"),
        "a tensor without an entry": header(lambda result: result.pop(SOME)),
        "a header that is a list": replace(WEIGHTS, (2).to_bytes(8, "little") + b"[]"),
        "a header larger than the file": replace(WEIGHTS, (2**60).to_bytes(8, "little") + b"{}"),
        "a header of garbage": replace(WEIGHTS, bytes(range(256)) * 64),
    }  # fmt: skip


def _files():
    def folder_in_place(folder):
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).mkdir()

    return {
        **{f"{file} is {what}": replace(file, content) for what, content in NOT_OBJECTS.items()
           for file in (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG)},
        **{f"weights cut at {keep}": lambda folder, keep=keep: (folder / WEIGHTS).write_bytes(
            (folder / WEIGHTS).read_bytes()[:keep]) for keep in (0, 5, 200, 20_000, -1)},
        "weights are a folder": folder_in_place,
        "no weights": without(WEIGHTS),
        "pickled weights": together(
            without(WEIGHTS), replace("pytorch_model.bin", b"\x80\x04cos\nsystem\n(S'exit 3'\ntR.")
        ),
        "no config": without(CONFIG),
        "no tokenizer": without(TOKENIZER, TOKENIZER_CONFIG),
        "no tokens": together(without(TOKENIZER), replace(TOKENIZER_CONFIG, ALONE)),
        "a tokenizer with code": together(without(TOKENIZER), replace(TOKENIZER_CONFIG, FOREIGN)),
        "a LoRA adapter": replace("adapter_config.json", '{"base_model_name_or_path": "some/base"}'),
        "only a GGUF file": together(without(CONFIG, WEIGHTS), replace("model-Q4.gguf", b"GGUF")),
        "two GGUF files": together(
            without(CONFIG, WEIGHTS), replace("model-Q4.gguf", b"GGUF"), replace("model-Q8.gguf", b"GGUF")
        ),
    }  # fmt: skip


def _indices():
    names = {
        "pickled weights": "weights.bin", "a file above": "../part.safetensors", "a file elsewhere": "/x.safetensors",
        "a file below": "sub/part.safetensors", "a file of Windows": "..\\part.safetensors", "nothing": "",
        "a missing file": "other.safetensors", "a dot": ".safetensors", "the folder above": "..",
    }  # fmt: skip
    return {
        **{f"an index that names {what}": index(name) for what, name in names.items()},
        "an index that names a number": index({QUERY: 3}),
        "an index without names": index({}),
        "an index with a list": index([1]),
        "an index without metadata": index("part.safetensors", None),
        "an index of garbage": together(index("part.safetensors"), replace(WEIGHTS + ".index.json", "[")),
        "an index with a tensor twice": together(
            lambda folder: save_file({QUERY: torch.ones(2)}, folder / "twice.safetensors"),
            index({QUERY: "twice.safetensors", SOME: "part.safetensors"}),
        ),
    }


DAMAGES = {
    **_files(), **_headers(), **_tensors(), **_indices(),
    **_named(CONFIG, FIELDS),
    **{f"weights of {name}": edit(CONFIG, quantization_config=scheme) for name, scheme in SCHEMES.items()},
    "weights of MLX": edit(CONFIG, quantization=MLX, quantization_config=MLX),
    **_named(GENERATION, {"eos_token_id": ("x", [0, "x"], -1, 3.5, {}, [[0]], True)}),
    **{f"{CONFIG} alone: eos_token_id is {token}": together(without(GENERATION), edit(CONFIG, eos_token_id=token))
       for token in (-1, [0, -1])},
    **_named(TOKENIZER, TOKENIZERS),
    **_named(TOKENIZER_CONFIG, TOKENIZER_FIELDS),
}  # fmt: skip


JUNK = (
    None, True, 0, -1, 3, 2**31 - 1, 2**63, 10**400, 0.5, 1e300, float("nan"), float("inf"), "", "x", [], [0], {},
    {"a": 1}, [[1, 2]], "[",
)  # fmt: skip
KINDS = (
    torch.float32, torch.float16, torch.int32, torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


def changed(tensor, random):
    """Another shape, another kind of numbers, or other numbers."""
    axis = random.randrange(max(tensor.dim(), 1))
    ways = (
        lambda: tensor[:0],
        lambda: tensor[tensor.shape[0] // 2 :],
        lambda: tensor.narrow(axis, 0, tensor.shape[axis] - 1),
        lambda: tensor.narrow(axis, 0, 0),
        lambda: torch.cat([tensor, tensor], dim=axis),
        lambda: tensor.unsqueeze(axis),
        lambda: tensor.flatten(),
        lambda: tensor.flatten()[0],
        lambda: tensor.flatten()[:1],
        lambda: tensor.transpose(0, -1),
        lambda: tensor.new_zeros((0, *tensor.shape)),
        lambda: tensor.to(torch.float32).to(random.choice(KINDS)),
        lambda: torch.zeros_like(tensor),
        lambda: torch.full(tensor.shape, random.choice((-(2**31), 2**31 - 1, -1, 7)), dtype=torch.int32),
    )
    return (random.choice(ways)() if tensor.dim() else tensor.to(random.choice(KINDS))).contiguous().clone()


def mutate_tensor(file, random):
    def damage(folder):
        result = load_file(folder / file)
        name = random.choice(sorted(result))
        if random.random() < 0.15:
            del result[name]
        else:
            result[name] = changed(result[name], random)
        save_file(result, folder / file, metadata={"format": "pt"})

    return damage


def mutate_json(file, random, *within):
    """Another value in place of one of a JSON file, in the object at a path, at any depth."""

    def damage(folder):
        content = json.loads((folder / file).read_text())
        part = content
        for key in within:
            part = part[key]
        while True:
            key = random.choice(sorted(part) if isinstance(part, dict) else range(len(part)))
            if not isinstance(part[key], (dict, list)) or not part[key] or random.random() < 0.5:
                break
            part = part[key]
        part[key] = random.choice(JUNK)
        (folder / file).write_text(json.dumps(content))

    return damage
