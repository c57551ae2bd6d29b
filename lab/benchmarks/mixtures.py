"""What rows of a forward cost in a mixture of experts on text, and what is predicted of it.

python lab/benchmarks/mixtures.py [--quantization q8_0] [--layers 2] [--threads 1 2]

A checkpoint of Qwen3-30B-A3B's shape (128 experts, 8 a row), fewer layers and random weights; text is the standard
library's. Rows of one text choose alike more often than by chance, as tokens repeat; rows of one token repeated all
choose the same experts, which is why nothing is measured on those but the column that says so.

"By bytes" knows one row's seconds, the share of an expert's bytes, and the experts that forwards of 1, 3 and 6 rows of
other texts read: what ``adaptive`` begins with. "By rows" draws a straight line over rows between those forwards.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.core.batch import Batch, Span
from forerun.core.inference import inference
from forerun.measure.planner import cost_curve
from forerun.measure.prompts import make_prompts
from forerun.models.load import load_model
from forerun.models.run.base import Model, new_attention
from forerun.models.text.tokenizer import load_tokenizer
from forerun.speculate.length.experts import ExpertReads
from forerun.theory import expected_experts

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 4096, "norm_topk_prob": True, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
KNOWN, ASKED = (1, 3, 6), (1, 2, 4, 8, 16)
CONTEXT, LONGEST = 64, 448
SAME = -1
"""Names, in place of a number of rows, ``ASKED[-1]`` rows of one token."""


def save(folder: Path, layers: int, vocabulary: int) -> None:
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=layers, vocab_size=vocabulary, **SHAPE)
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator, files, held = torch.Generator().manual_seed(0), {}, 0
    for number, (name, shape) in enumerate(shapes.items()):
        if name == "lm_head.weight":
            continue
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        tensor = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02, generator=generator)
        save_file({name: tensor}, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        files[name], held = f"model-{number:05d}.safetensors", held + tensor.nbytes
    index = {"metadata": {"total_size": held}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@inference
def forwards(model: Model, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> Iterator[tuple[int, float, int]]:
    """Rows, seconds and experts read, of forwards of so many rows at places all over the texts."""
    attention = new_attention(model, max_seqs=1, max_len=LONGEST + 32)
    for text in texts:
        model.forward(Batch([Span(0, 0, list(text[:CONTEXT]), logits=[])]), attention)
        for start in range(CONTEXT, len(text) - ASKED[-1], ASKED[-1]):
            for count in counts:
                rows = [text[start]] * ASKED[-1] if count == SAME else list(text[start : start + count])
                span = Span(0, start, rows, logits=list(range(len(rows))))
                began = perf_counter()
                experts = model.forward(Batch([span]), attention).experts
                yield count, perf_counter() - began, experts
                attention.pool.truncate(0, start)
            span = Span(0, start, list(text[start : start + ASKED[-1]]), logits=[])
            model.forward(Batch([span]), attention)
        attention.pool.free(0)


def table(model: Model, texts: Sequence[Sequence[int]]) -> Iterator[str]:
    assert model.info.mixture is not None
    half, mixture = len(texts) // 2, model.info.mixture
    reads, times = ExpertReads(mixture), defaultdict(list)
    for rows, seconds, experts in forwards(model, texts[:half], KNOWN):
        times[rows].append(seconds)
        reads.learn(rows, 1, experts)
    one = median(times[1])
    points = {rows: median(seconds) / one for rows, seconds in times.items()}
    before = cost_curve(points)
    result: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for rows, seconds, experts in forwards(model, texts[half:], (*ASKED, SAME)):
        result[rows].append((seconds, experts))
    one = median(seconds for seconds, _ in result[1])
    yield f"experts are {mixture.share:.2f} of a row's bytes; a row reads {reads.same_text:.2f} of another row's again"
    yield "| rows | experts a layer | by chance | expected | ms | over one row | by bytes | by rows |"
    yield "|---" * 8 + "|"
    for rows, each in result.items():
        count = ASKED[-1] if rows == SAME else rows
        read = sum(experts for _, experts in each) / len(each) / mixture.layers
        seconds = median(seconds for seconds, _ in each)
        cells = [f"{seconds * 1e3:.2f}", f"{seconds / one:.2f}"]
        if rows == SAME:
            yield f"| {count} of one token | {read:.1f} | | | {' | '.join(cells)} | | |"
            continue
        chance = expected_experts(mixture.count, mixture.chosen, rows)
        cells += [f"{value:.2f} ({value / (seconds / one) - 1:+.0%})" for value in (reads.price(rows, 1), before(rows))]
        expected = reads.times(rows, 1) * mixture.chosen
        yield f"| {count} | {read:.1f} | {chance:.1f} | {expected:.1f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quantization", nargs="*", default=["q8_0"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept")
    given = parser.parse_args()
    tokenizer = load_tokenizer("forerun:target")
    texts = make_prompts("held_out", tokenizer, count=given.texts, length=LONGEST)
    with TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            save(folder, given.layers, len(tokenizer))
        for quantization in given.quantization:
            model = load_model(folder, quantization=quantization, invariant=True)
            for threads in given.threads:
                torch.set_num_threads(threads)
                print(f"\n{quantization}, {threads} threads: ", end="")
                for line in table(model, texts):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
