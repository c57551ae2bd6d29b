"""Texts that are hard to cut, and llama.cpp's tokens of them under every pre-tokenizer: ``tests/oracle/words.json.xz``.

python lab/tools/llama_words.py LLAMA_CPP BUILD [--out FOLDER]

The vocabulary is learned from the texts uncut, so that a merge crosses every place where they might be cut. Prints for
each vocabulary among llama.cpp's own (``models/ggml-vocab-*.gguf``) on how many texts Forerun agrees with it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

from llama_oracle import ROOT, LlamaCpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from forerun.core.errors import ModelError
from forerun.models.files.gguf import GGUFFile
from forerun.models.text.gguf_tokenizer import PRE_TOKENIZERS, make_tokenizer

TEXT = (
    "a b z A Z the The THE e\u0301 \u00e9 \u00df \u0130 \u01c5 \u02b0 \u0434 \u0416 \u4e2d\u6587 \u3042 \u30ab\u30bf "
    "\ud55c\uae00 \u0e01\u0e33 \u0939\u093f\u0928\u094d \u0639\u0631 \u05d0 \U00010400 \U0001d400 1 12 123 4567 "
    "\u0663 \u00b2 \u2167 \u00bd 's 'S 't 'll 'LL 've 'D 'x \u2019s . , ! ? ... -- _ / // \\ ( ) [ ] { } "
    '" # $ % & * + < = > ^ ~ | ` @ \u20ac \u00a3 \u00d7 \u00ac \u3002 \uff0c \u300c \uff01 \u2026 \u2014 \u00ab '
    "\U0001f600 \U0001f469\u200d\U0001f4bb \ufe0f \u200b \ufeff \u00ad \u0301 \u093f"
)
PARTS = TEXT.split(" ")
SPACES = [" ", " ", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u2003", "\u3000", "\x0b", "\x85"]


def texts(count: int = 400) -> list[str]:
    draw = random.Random(0)
    made = ["".join(draw.choices([*PARTS, *SPACES * 3], k=draw.randrange(1, 12))) for _ in range(count)]
    return [unicodedata.normalize("NFC", text) for text in made]  # which some models do first, and llama.cpp never


def vocabulary(given: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(given * 2, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=letters))
    told = json.loads(made.to_str())["model"]
    return sorted(told["vocab"], key=told["vocab"].get), [" ".join(pair) for pair in told["merges"]]


def tokens(llama: LlamaCpp, path: Path, given: list[str]) -> list[list[int]]:
    sent = b"".join(struct.pack("i", len(raw)) + raw for raw in (text.encode() for text in given))
    out = subprocess.run([llama.program, "tokens", path], input=sent, check=True, stdout=subprocess.PIPE).stdout
    numbers, result = [each for (each,) in struct.iter_unpack("i", out)], []
    while numbers:
        result.append(numbers[1 : 1 + numbers[0]])
        del numbers[: 1 + numbers[0]]
    return result


def write(path: Path, pre: str, words: list[str], merges: list[str]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def compare(llama: LlamaCpp, path: Path, given: list[str]) -> str:
    try:
        ours = make_tokenizer(GGUFFile(path).metadata, str(path))
    except ModelError as error:
        return f"refused: {error}"
    theirs = tokens(llama, path, given)
    wrong = [text for text, ids in zip(given, theirs) if ours.encode(text) != ids]
    return f"{len(given) - len(wrong)} of {len(given)} alike" + "".join(f"\n    {text!r}" for text in wrong[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/oracle")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        llama, hard, ids = LlamaCpp(given.sources, given.build, Path(made)), texts(), {}
        words, merges = vocabulary(hard)
        for pre in sorted(PRE_TOKENIZERS):
            path = Path(made) / f"{pre}.gguf"
            write(path, pre, words, merges)
            ids[pre] = tokens(llama, path, hard)
            print(pre, compare(llama, path, hard), flush=True)
        for path in sorted((given.sources / "models").glob("ggml-vocab-*.gguf")):
            print(path.stem, compare(llama, path, hard), flush=True)
    kept = json.dumps({"tokens": words, "merges": merges, "texts": hard, "ids": ids}).encode()
    (given.out / "words.json.xz").write_bytes(lzma.compress(kept, preset=9))


if __name__ == "__main__":
    sys.exit(main())
