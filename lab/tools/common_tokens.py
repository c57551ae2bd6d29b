"""Counts the tokens of texts and writes the commonest ones, for drafts whose output layer predicts no others.

python lab/tools/common_tokens.py MODEL --out FILE --group WEIGHT GLOB [GLOB ...] [--group ...]

Each group of files counts as its weight says, whatever its length. FILE goes to
``src/forerun/pretrained/common_tokens``;
its metadata has tokens by which the tokenizer is known.
"""

from __future__ import annotations

import argparse
import glob
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file

from forerun.models.files.open import resolve
from forerun.models.text.tokenizer import load_tokenizer

FILE = 40_000
"""Most characters of a file."""


def texts(patterns: list[str], characters: int) -> Iterator[str]:
    """Files in random order, until they have so many characters."""
    files = sorted(file for pattern in patterns for file in glob.glob(pattern, recursive=True) if Path(file).is_file())
    random.Random(0).shuffle(files)
    for file in files:
        with open(file, encoding="utf-8", errors="ignore") as opened:
            text = opened.read(FILE)
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="whose tokenizer it is")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group", nargs="+", action="append", required=True, metavar="WEIGHT GLOB")
    parser.add_argument("--size", type=int, default=49_152)
    parser.add_argument("--characters", type=int, default=24_000_000, help="of each group")
    given = parser.parse_args()
    tokenizer = load_tokenizer(resolve(given.model))
    shares: list[torch.Tensor] = []
    for _, *patterns in given.group:
        counts = torch.zeros(len(tokenizer), dtype=torch.int64)
        read = texts(patterns, given.characters)
        while some := list(islice(read, 64)):
            for encoding in tokenizer.backend_tokenizer.encode_batch(some, add_special_tokens=False):
                counts += torch.bincount(torch.tensor(encoding.ids, dtype=torch.int64), minlength=len(counts))
        shares.append(counts / counts.sum())
        print(f"{patterns}: {counts.sum()} tokens, {int((counts > 0).sum())} different ones")
    common = sum(float(weight) * share for (weight, *_), share in zip(given.group, shares))
    tokens = torch.argsort(common, descending=True, stable=True)[: given.size]  # type: ignore[arg-type]
    for (_, *patterns), share in zip(given.group, shares):
        print(f"{patterns}: {share[tokens].sum():.2%} are in the table")
    probes = torch.linspace(0, len(tokenizer) - 1, 9).long().tolist()
    known = dict(zip(map(str, probes), tokenizer.convert_ids_to_tokens(probes)))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens.to(torch.int32)}, given.out, metadata=known)


if __name__ == "__main__":
    main()
