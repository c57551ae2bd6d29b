"""What a target saw in its own text while it wrote it, kept on disk: hidden states of a few layers in bfloat16."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.core.errors import ConfigError
from forerun.speculate.draft.heads.head import Lesson


@dataclass(frozen=True)
class Talk:
    """A conversation: where it lies, its tokens, and how many of them are the prompt's."""

    part: int
    start: int
    length: int
    prompt: int


class Features:
    """The files that ``text.Writer`` wrote into a folder, read from disk as they are needed; more may come."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.parts: list[dict[str, Any]] = []
        self.talks: list[Talk] = []
        self.names: set[str] = set()
        self.look()

    def look(self) -> None:
        """Take in the files that are new."""
        for path in sorted(self.folder.glob("*.pt")):
            if path.name in self.names:
                continue
            part = torch.load(path, mmap=True, weights_only=True)
            if self.parts and part["layers"] != self.parts[0]["layers"]:
                raise ConfigError(f"{path} holds other layers than the files before it")
            at = 0
            for length, prompt in zip(part["lengths"].tolist(), part["prompts"].tolist()):
                self.talks.append(Talk(len(self.parts), at, length, prompt))
                at += length
            self.parts.append(part)
            self.names.add(path.name)

    @property
    def layers(self) -> list[int]:
        return list(self.parts[0]["layers"])

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token is in an answer, int64 [vocabulary]."""
        total = torch.zeros(vocabulary, dtype=torch.long)
        for tokens in self.answers():
            total += torch.bincount(tokens.long(), minlength=vocabulary)
        return total

    def answers(self) -> Iterator[Tensor]:
        """Token ids of each conversation's last answer."""
        for talk in self.talks:
            yield self.parts[talk.part]["tokens"][talk.start + talk.prompt : talk.start + talk.length]

    def sample(self, tokens: int) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """Conversations of ``tokens`` tokens together: the file, and where in it, how long, and how much is prompt."""
        for talk in self.talks:
            if tokens <= 0:
                return
            tokens -= talk.length
            yield self.parts[talk.part], talk.start, talk.length, talk.prompt

    def each(self) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """All of them, as ``sample`` gives them."""
        return self.sample(sum(talk.length for talk in self.talks) + 1)

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Conversations drawn at random and laid end to end, int64 [rows, length, 3]: where each token is (part and
        place), and its conversation's number in the row."""
        draw = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {consumed}".encode()))
        if consumed % (8 * rows * length) == 0:
            self.look()
        out = torch.empty(rows, length, 3, dtype=torch.long)
        for row in range(rows):
            at, number = 0, 0
            while at < length:
                talk = self.talks[int(torch.randint(len(self.talks), (), generator=draw))]
                # of a long prompt, the end: what comes before it is in the features
                skip = max(0, talk.prompt - 128)
                count = min(talk.length - skip, length - at)
                out[row, at : at + count, 0] = talk.part
                out[row, at : at + count, 1] = torch.arange(count) + talk.start + skip
                out[row, at : at + count, 2] = number * (1 << 20) + talk.prompt - skip
                at, number = at + count, number + 1
        return out

    def lesson(self, indices: Tensor, target: PreTrainedModel, embedding: Tensor, head: Tensor, narrow: bool) -> Lesson:
        """What a draft learns from at ``indices`` (``batch``); ``head`` reads hidden states, of the drafted tokens
        alone where it is ``narrow``."""
        rows, length, _ = indices.shape
        tokens = torch.empty(rows * length, dtype=torch.long)
        wide = torch.empty(rows * length, self.parts[0]["hidden"].shape[1], dtype=torch.bfloat16)
        flat = indices.view(-1, 3)
        for part in flat[:, 0].unique().tolist():
            mine = flat[:, 0] == part
            at = flat[mine, 1]
            tokens[mine] = self.parts[part]["tokens"][at].long()
            wide[mine] = self.parts[part]["hidden"][at]
        states = wide.view(rows, length, -1).float().chunk(len(self.layers), dim=-1)
        segment = indices[..., 2] >> 20
        prompt = indices[..., 2] & ((1 << 20) - 1)
        inside = torch.arange(length) - _starts(segment)
        return Lesson(
            tokens=tokens.view(rows, length),
            hidden=dict(zip(self.layers, states)),
            logits=None,
            embedding=embedding,
            head=head,
            target=target,
            segments=segment,
            answers=inside >= prompt,
            narrow=narrow,
        )


def _starts(segments: Tensor) -> Tensor:
    """Where the conversation of each place begins, int64 [rows, length]."""
    length = segments.shape[1]
    new = torch.ones_like(segments, dtype=torch.bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(new, torch.arange(length), 0).cummax(dim=1).values
