"""``python -m forerun_lab.bench.fidelity``: how weight formats change logits, perplexity and greedy texts.

The reference is the same checkpoint in float32 through transformers' modules, with a GGUF file's blocks dequantized.
Windows of a held-out text are fed whole; every token but a window's first counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics

import torch

from forerun import LLM, SamplingParams
from forerun.core.errors import ForerunError
from forerun.measure.environment import logits, processor
from forerun.measure.page import markdown
from forerun.models import formats
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.load import load_model
from forerun.models.run.hf import read_module
from forerun.models.text.tokenizer import load_tokenizer
from forerun_lab.peers.outside import scorer

EXACT = "float32"
"""The reference row."""


@dataclass
class FidelityRow:
    """One format. ``error``: of logits, relative to their spread; ``kl``: nats a token, from the exact ones."""

    format: str
    bytes: int | None = None
    perplexity: float = math.nan
    over_exact: float = math.nan
    """Perplexity over that of float32, minus 1."""
    error: float | None = None
    kl: float | None = None
    same_choices: float | None = None
    """Fraction of positions whose likeliest token is that of float32."""
    same_texts: int | None = None
    """Number of greedy answers that equal float32's."""


@dataclass
class FidelitySums:
    """Sums over windows."""

    nats: float = 0.0
    kl: float = 0.0
    error: float = 0.0
    same: int = 0
    count: int = 0
    windows: int = 0

    def add(self, window: Sequence[int], exact: torch.Tensor, got: torch.Tensor) -> None:
        expected, result = exact.double().log_softmax(-1), got.double().log_softmax(-1)
        targets = torch.tensor(window[1:])
        self.nats -= float(result[:-1].gather(-1, targets[:, None]).sum())
        self.kl += float((expected.exp() * (expected - result)).sum())
        self.error += formats.error(exact, got)
        self.same += int((exact.argmax(-1) == got.argmax(-1)).sum())
        self.count += len(window)
        self.windows += 1

    def row(self, name: str, size: int | None) -> FidelityRow:
        perplexity = math.exp(self.nats / (self.count - self.windows))
        return FidelityRow(name, size, perplexity, error=self.error / self.windows, kl=self.kl / self.count,
                   same_choices=self.same / self.count)  # fmt: skip


def windows_of(text: str, model: str, size: int, count: int) -> list[list[int]]:
    """Token ids of at most ``count`` windows of ``size`` tokens. Raises ForerunError."""
    ids = load_tokenizer(str(resolve(model))).encode(text[: 16 * size * count])
    result = [ids[first : first + size] for first in range(0, size * count, size)]
    whole = [window for window in result if len(window) == size]
    if not whole:
        raise ForerunError(f"the text has {len(ids)} tokens, fewer than a window of {size}")
    return whole


class Exact:
    """The checkpoint in float32 through transformers."""

    def __init__(self, model: str) -> None:
        self.module = read_module(Checkpoint.at(resolve(model)), torch.float32, attention="sdpa").eval()

    @torch.inference_mode()
    def logits(self, window: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]."""
        result: torch.Tensor = self.module(torch.tensor([list(window)])).logits[0]
        return result

    @torch.inference_mode()
    def text(self, prompt: Sequence[int], length: int) -> list[int]:
        """A greedy answer of ``length`` tokens."""
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        result = self.module.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answer: list[int] = result[0, len(prompt) :].tolist()
        return answer


def measure(args: argparse.Namespace, progress: Callable[[str], None]) -> Iterator[FidelityRow]:
    """Yields a row for each format, the reference first. Raises ForerunError."""
    text = Path(args.text).read_text("utf-8") if args.text else "\n".join(topics.topics.values())
    windows = windows_of(text, args.model, args.window, args.windows)
    exact = Exact(args.model)
    references = []
    seen = FidelitySums()
    for window in windows:
        references.append(exact.logits(window))
        seen.add(window, references[-1], references[-1])
    prompts = [window[: args.window // 4] for window in windows]
    answers = [exact.text(prompt, args.text_tokens) for prompt in prompts]
    del exact
    first = seen.row(EXACT, None)
    first.over_exact, first.same_texts = 0.0, len(answers)
    yield first
    for name in args.formats.split(","):
        progress(f"loading {name}")
        row = _ours(args, name, windows, references, prompts, answers)
        row.over_exact = row.perplexity / first.perplexity - 1
        yield row
        gc.collect()
    if args.llama_cpp:
        progress("llama.cpp")
        row = _llama_cpp(args, windows, references)
        row.over_exact = row.perplexity / first.perplexity - 1
        yield row


def _ours(
    args: argparse.Namespace, name: str, windows: Sequence[list[int]], references: Sequence[torch.Tensor],
    prompts: Sequence[list[int]], answers: Sequence[list[int]],
) -> FidelityRow:  # fmt: skip
    model = load_model(args.model, quantization=name, invariant=True)
    seen = FidelitySums()
    for window, reference in zip(windows, references):
        seen.add(window, reference, logits(model, [window]).float())
    row = seen.row(name, model.info.weight_bytes)
    del model
    llm = LLM(args.model, quantization=name, threads=torch.get_num_threads(), speculative_config=None)
    params = SamplingParams(temperature=0, max_tokens=args.text_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    row.same_texts = sum(list(o.outputs[0].token_ids) == a for o, a in zip(outputs, answers, strict=True))
    return row


def _llama_cpp(
    args: argparse.Namespace, windows: Sequence[list[int]], references: Sequence[torch.Tensor]
) -> FidelityRow:
    """llama.cpp's perplexity of the text, and the fraction of positions with float32's likeliest token."""
    nats, same = 0.0, 0
    with scorer(args.llama_cpp, args.model, args.window, args.threads) as score:
        for window, reference in zip(windows, references):
            answer = score(window)
            nats -= math.fsum(answer["logprobs"])
            same += sum(a == b for a, b in zip(answer["choices"], reference.argmax(-1).tolist(), strict=True))
    tokens = sum(map(len, windows))
    return FidelityRow("llama.cpp", None, math.exp(nats / (tokens - len(windows))), same_choices=same / tokens)


def table(rows: Sequence[FidelityRow]) -> str:
    """Markdown."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    heads = ["weights", "bytes", "perplexity", "over float32", "logits' error", "KL, nats", "same choices",
             "same texts"]  # fmt: skip
    cells = [
        [row.format, shown(row.bytes, ","), f"{row.perplexity:.4f}", f"{row.over_exact:+.3%}",
         shown(row.error, ".2%"), shown(row.kl, ".1e"), shown(row.same_choices, ".2%"), shown(row.same_texts, "d")]
        for row in rows
    ]  # fmt: skip
    return markdown(heads, cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun_lab.bench.fidelity", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="as everywhere")
    parser.add_argument("--formats", default="none,bfloat16,int8_rows,q8_0,q4_1,q4_0,q4_k", help="as --quantization")
    parser.add_argument("--text", help="held-out text [default: Python's reference manual]")
    parser.add_argument("--window", type=int, default=512, help="tokens fed at once")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--text-tokens", type=int, default=64, help="of a greedy text after a quarter of each window")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="compare with llama.cpp in this Python's environment")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    try:
        for row in measure(args, lambda text: print(text, file=sys.stderr, flush=True)):
            rows.append(row)
    except (ForerunError, OSError) as error:
        sys.exit(f"error: {error}")
    print(table(rows))
    if args.out:
        about = {"processor": processor(), "arguments": {k: str(v) for k, v in vars(args).items()}}
        args.out.write_text(json.dumps({"environment": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
