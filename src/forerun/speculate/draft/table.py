"""``table``: a unigram or bigram model counted from a text (the bigram drafts of Leviathan et al. 2023, table 3)."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from forerun import pretrained
from forerun.core.errors import ConfigError
from forerun.core.sequence import Sequence
from forerun.core.tree import Draft
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, DrafterConfig, drafters
from forerun.speculate.draft.counts import CountChooser, Counts

DEFAULT_SIZE = 400_000


@dataclass(frozen=True)
class TableConfig(DrafterConfig):
    table_file: str | None = None
    """Text whose tokens are counted; None: modules of Python's own standard library."""
    table_order: int = 2
    """2: q is what followed the previous token in the text (all tokens' counts where nothing did); 1: all tokens'
    counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None:
            raise ConfigError("method 'table' drafts chains; remove 'tree'")
        if self.table_order not in (1, 2):
            raise ConfigError(f"table_order must be 1 or 2, not {self.table_order!r}")


def default_text() -> str:
    """The running interpreter's top-level modules in order of name, up to ``DEFAULT_SIZE`` characters, without the
    files that the bundled target's record holds out."""
    held_out: set[str] = set()
    if "target" in pretrained.names():
        record = pretrained.path("target") / "training.json"
        held_out.update(json.loads(record.read_text(encoding="utf-8"))["held_out_files"])
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size < DEFAULT_SIZE and path.name not in held_out:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1])
    return "\n".join(parts)


def count_text(text: str, tokenizer: Any) -> tuple[Counter[int], dict[int, Counter[int]]]:
    """How often each token occurs in ``text``, and how often each follows each."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    for before, token in pairwise(ids):
        followers[before][token] += 1
    return Counter(ids), followers


@drafters.register("table")
class Table(Drafter[TableConfig]):
    name = "table"
    config_class = TableConfig

    def __init__(self, config: TableConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        if context.tokenizer is None:
            raise ConfigError("method 'table' counts tokens of a text and needs a tokenizer")
        device = context.sampler.device
        unigrams, bigrams = count_text(self._text(), context.tokenizer)
        if not unigrams:
            raise ConfigError(f"table_file {config.table_file} holds no text to count")
        self.anywhere = Counts.of(unigrams, device)
        self.after = {token: Counts.of(counts, device) for token, counts in bigrams.items()}
        self.likeliest = {token: counts.most_common(1)[0][0] for token, counts in bigrams.items()}
        self.likeliest_anywhere = unigrams.most_common(1)[0][0]
        self.counted = CountChooser(Chooser(context.sampler, context.rule, config.draft_temperature, context.stream))

    def _text(self) -> str:
        if self.config.table_file is None:
            return default_text()
        path = Path(self.config.table_file).expanduser()
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"table_file {path} cannot be read: {error.strerror}") from error

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return self.counted.finish([self._draft(s, budget) for s, budget in zip(sequences, budgets)])

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        bigrams = self.config.table_order == 2
        previous = sequence.tokens[-1]
        if sequence.params.greedy:
            tokens: list[int] = []
            for _ in range(budget):
                previous = self.likeliest.get(previous, self.likeliest_anywhere) if bigrams else self.likeliest_anywhere
                tokens.append(previous)
            return Draft.chain(tokens)
        draft = Draft()
        for depth in range(budget):
            counts = self.after.get(previous, self.anywhere) if bigrams else self.anywhere
            row = self.counted.chooser.row(sequence, draft.tokens)
            previous, q_row = self.counted.draw(counts, row, depth - 1, budget - depth - 1)
            draft.add(previous, depth - 1, q_row)
        return draft

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        text = folder / "counted.txt"
        text.write_text("def parse(text):\n    return [word for word in text.split() if word]\n" * 3, encoding="utf-8")
        return {"table_file": str(text)}
