"""The engine on a GPU in two minutes: identity, bits and speed on random models. ``python gpu_check.py [PART ...]``.

PARTS are ``identity`` (plain against drafted tokens), ``bits`` (the self-test of rows) and ``speed`` (Llama-3.2-1B's
shape in bfloat16, plain and with a draft of synthetic acceptance). ``tests/unit/test_triton.py`` runs on the GPU, too.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import LLM, ForerunError, SamplingParams
from forerun.models.invariance import self_test
from forerun.models.load import load_model
from forerun.models.open import resolve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATES = [0.8, 0.65, 0.5, 0.4]
"""Synthetic acceptance of four drafted tokens."""


def save(folder, layers, hidden, inner, heads, kv_heads, vocabulary, dtype, spread=0.02):
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, initializer_range=spread,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    for file in Path(resolve("forerun:draft")).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def prompts(count, length):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 4096, (length + 3 * i,), generator=generator).tolist() for i in range(count)]


def identity(place):
    target = save(place / "target", 4, 256, 512, 4, 2, 4096, torch.float32, 0.08)
    draft = save(place / "draft", 1, 256, 512, 4, 2, 4096, torch.float32, 0.08)
    ways = [{"method": "ngram"}, {"method": "suffix"}]
    ways += [{"method": "draft_model", "model": model, "num_speculative_tokens": 4} for model in (target, draft)]
    for dtype, invariant in (("float32", None), ("bfloat16", None), ("float32", True), ("bfloat16", True)):
        plain = None
        for way in (None, *ways):
            try:
                llm = LLM(target, device=DEVICE, dtype=dtype, invariant=invariant, speculative_config=way)
            except ForerunError as error:
                print("identity", dtype, invariant, way, error, flush=True)
                continue
            answers = []
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=7, max_tokens=48, ignore_eos=True)
                answers += [out.outputs[0].token_ids for out in llm.generate(prompts(6, 20), params, use_tqdm=False)]
            plain = plain or answers
            same = sum(map(list.__eq__, map(list, plain), map(list, answers)))
            print(
                "identity",
                dtype,
                "invariant",
                invariant,
                way and way["method"],
                f"{same} of {len(answers)}",
                flush=True,
            )
            llm.close()


def bits(place):
    target = save(place / "bits", 4, 256, 512, 4, 2, 4096, torch.float32, 0.08)
    for dtype in (torch.float32, torch.bfloat16):
        for invariant in (False, True):
            model = load_model(target, device=DEVICE, dtype=dtype, invariant=invariant)
            for finding in self_test(model, page_size=16, rows=100) or ["every row as decoded"]:
                print("bits", dtype, "invariant", invariant, model.tiles and model.tiles.rows, finding, flush=True)


def speed(place):
    target = save(place / "b1", 16, 2048, 8192, 32, 8, 128256, torch.bfloat16)
    small = save(place / "b1d", 2, 1024, 4096, 16, 8, 128256, torch.bfloat16)
    way = {"method": "draft_model", "model": small, "num_speculative_tokens": 4, "synthetic_acceptance_rates": RATES}
    for streams in (1, 16, 64):
        for config in (None, way):
            llm = LLM(target, device=DEVICE, speculative_config=config, max_num_seqs=64, max_model_len=512)
            params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
            times = []
            for _ in range(3):
                began = time.monotonic()
                llm.generate(prompts(streams, 64), params, use_tqdm=False)
                times.append(time.monotonic() - began)
            best, size = min(times), llm.model.info.weight_bytes
            rate = size * params.max_tokens / best / 1e12
            name = "plain" if config is None else "draft_model"
            print(
                "speed",
                streams,
                name,
                f"{96 * streams / best:.0f} tokens/s, {rate:.2f} TB/s of weights if plain",
                flush=True,
            )
            llm.close()


if __name__ == "__main__":
    print(DEVICE, torch.__version__, torch.cuda.get_device_name() if DEVICE == "cuda" else "")
    with tempfile.TemporaryDirectory() as folder:
        for part in (identity, bits, speed):
            if part.__name__ in (sys.argv[1:] or [part.__name__]):
                part(Path(folder))
