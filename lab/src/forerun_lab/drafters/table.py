"""``table``: a unigram or bigram model, counted from a text (the bigram drafts of Leviathan et al. 2023, table 3).

With ``adapt``, it adds the target's probabilities to the counts while it serves.
"""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from forerun import pretrained
from forerun.core.config import POSITIVE, Within
from forerun.core.errors import ConfigError
from forerun.core.folders import expanded, replace_with
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, DrafterConfig
from forerun.speculate.verify import Verification
from forerun_lab.drafters.counts import CountChooser, Counts

DEFAULT_SIZE = 400_000
FORMAT = "forerun_table"
MAX_FOLLOWERS = 64
"""An adapted token with more than twice as many followers is cut to this number."""
TOP_OBSERVED = 8
"""How many of a distribution's likeliest tokens are counted."""


@dataclass(frozen=True)
class TableConfig(DrafterConfig):
    table_file: str | None = None
    """Text whose tokens are counted; None: modules of Python's own standard library."""
    table_order: int = 2
    """2: bigram counts, or unigram counts after a token that was never followed; 1: unigram counts."""
    adapt: bool = False
    """Add the target's next-token probabilities, times ``adapt_weight``, to the counts."""
    adapt_weight: float = 4.0
    adapt_save: str | None = None
    """File for the counts, written when the engine closes; name it as ``table_file`` next time."""
    unsupported: ClassVar = {"tree": "method 'table' drafts chains"}
    limits: ClassVar = {"adapt_weight": POSITIVE, "table_order": Within(least=1, most=2, whole=True)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapt_save is not None and not self.adapt:
            raise ConfigError("adapt_save keeps what 'adapt' learns: set 'adapt' too")


def default_text() -> str:
    """The source of the standard library's top-level modules, up to ``DEFAULT_SIZE`` characters, without the files held
    out from the bundled target's training."""
    record = pretrained.path("target") / "training.json"
    held_out = set(json.loads(record.read_text(encoding="utf-8"))["held_out_files"])
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size < DEFAULT_SIZE and path.name not in held_out:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1])
    return "\n".join(parts)


class Tables:
    """Unigram counts ``anywhere`` and bigram counts ``after``; both may grow."""

    def __init__(self, anywhere: dict[int, float], after: dict[int, dict[int, float]], device: torch.device) -> None:
        self.anywhere, self.after, self.device = anywhere, after, device
        self._ready: dict[int | None, Counts] = {}
        self._total, self._added = sum(anywhere.values()), 0.0

    @classmethod
    def of_text(cls, text: str, tokenizer: Any, device: torch.device) -> Tables:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        followers: dict[int, dict[int, float]] = {}
        for before, token in pairwise(ids):
            counts = followers.setdefault(before, {})
            counts[token] = counts.get(token, 0.0) + 1.0
        return cls({token: float(count) for token, count in Counter(ids).items()}, followers, device)

    @classmethod
    def of_json(cls, content: dict[str, Any], device: torch.device) -> Tables:
        """Reads what ``save`` wrote. Raises ConfigError for anything else."""
        try:
            anywhere, after = ({int(k): v for k, v in content[part].items()} for part in ("anywhere", "after"))
            followers = {token: {int(k): float(n) for k, n in counts.items()} for token, counts in after.items()}
            return cls({token: float(count) for token, count in anywhere.items()}, followers, device)
        except (KeyError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(f"the counts are damaged: {error}") from error

    def counts(self, before: int | None) -> Counts:
        """Bigram counts after ``before``; unigram counts for None, and where there are none."""
        key = before if before in self.after else None
        result = self._ready.get(key)
        if result is None:
            result = self._ready[key] = Counts.of(self.anywhere if key is None else self.after[key], self.device)
        return result

    def add(self, before: int, ids: Sequence[int], amounts: Sequence[float]) -> None:
        """Adds ``amounts`` to the counts of ``ids`` after ``before``. Its rarest followers are dropped if there are too
        many. Unigram counts are sorted again after they have grown by a twentieth."""
        followers = self.after.setdefault(before, {})
        for token, amount in zip(ids, amounts):
            followers[token] = followers.get(token, 0.0) + amount
            self.anywhere[token] = self.anywhere.get(token, 0.0) + amount
        if len(followers) > 2 * MAX_FOLLOWERS:
            self.after[before] = dict(sorted(followers.items(), key=lambda item: -item[1])[:MAX_FOLLOWERS])
        self._ready.pop(before, None)
        self._added += sum(amounts)
        if self._added > self._total / 20:
            self._ready.pop(None, None)
            self._total, self._added = self._total + self._added, 0.0

    def save(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        content = json.dumps({FORMAT: 1, "anywhere": self.anywhere, "after": self.after})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_with(path, partial(Path.write_text, data=content, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"adapt_save: {path} cannot be written: {error.strerror}") from error


def _is_table(text: str) -> bool:
    return text.startswith(f'{{"{FORMAT}"')


class Table(Drafter[TableConfig]):
    """Drafts from unigram or bigram counts of a text."""

    name = "table"
    config_class = TableConfig

    def __init__(self, config: TableConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        if context.tokenizer is None:
            raise ConfigError("method 'table' counts tokens of a text and needs a tokenizer")
        kept = expanded(config.adapt_save or "")
        if config.adapt_save is not None and kept.is_file() and not _is_table(kept.read_text(errors="replace")):
            raise ConfigError(f"adapt_save: {kept} is no table of counts: choose another file")
        self.tables = self._read(context.sampler.device)
        if not self.tables.anywhere:
            raise ConfigError(f"table_file {config.table_file} holds no text to count")
        self.counted = CountChooser(Chooser.of(config, context))

    def _read(self, device: torch.device) -> Tables:
        if self.config.table_file is None:
            return Tables.of_text(default_text(), self.context.tokenizer, device)
        path = expanded(self.config.table_file)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"table_file {path} cannot be read: {error.strerror}") from error
        if not _is_table(text):
            return Tables.of_text(text, self.context.tokenizer, device)
        try:
            return Tables.of_json(json.loads(text), device)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"table_file {path} cannot be used: {error}") from error

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return self.counted.finish([self._draft(s, budget) for s, budget in zip(sequences, budgets)])

    def _draft(self, sequence: RequestState, budget: int) -> Draft:
        bigrams = self.config.table_order == 2
        previous = sequence.tokens[-1]
        draft = Draft()
        for depth in range(budget):
            counts = self.tables.counts(previous if bigrams else None)
            row = self.counted.chooser.row(sequence, draft.tokens)
            previous, q_row = self.counted.draw(counts, row, depth - 1, budget - depth - 1)
            draft.add(previous, depth - 1, q_row)
        return draft

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """With ``adapt``: counts the target's distribution after every token that was kept."""
        if not self.config.adapt:
            return
        scores = result.scores
        indices = {id(sequence): slot for slot, sequence in enumerate(scores.sequences)}
        rows: list[int] = []
        tokens: list[int] = []
        for sequence, verdict in zip(sequences, verdicts):
            slot = indices.get(id(sequence))
            if slot is None or verdict.error is not None:
                continue
            index = result.deciding[slot]
            root = result.logit_first[index] + len(result.batch.spans[index].logits) - 1 - len(scores.drafts[slot])
            kept = [-1, *verdict.path[: verdict.accepted]]
            rows += [root + 1 + node for node in kept]
            end = len(sequence.tokens) - len(verdict.tokens)
            tokens += sequence.tokens[end - 1 : end - 1 + len(kept)]
        if not rows:
            return
        logits = result.output.logits[rows]
        top = torch.softmax(logits, dim=1).topk(min(TOP_OBSERVED, logits.shape[1]), dim=1)
        amounts = (top.values * self.config.adapt_weight).tolist()
        for token, ids, weights in zip(tokens, top.indices.tolist(), amounts):
            self.tables.add(token, ids, weights)

    def close(self) -> None:
        if self.config.adapt_save is not None:
            self.tables.save(expanded(self.config.adapt_save))

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        text = folder / "counted.txt"
        text.write_text("def parse(text):\n    return [word for word in text.split() if word]\n" * 3, encoding="utf-8")
        return {"table_file": str(text)}
