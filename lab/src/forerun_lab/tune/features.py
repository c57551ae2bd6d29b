"""The training data of drafts: text that the target writes, with its hidden states of a few layers, kept on disk.

``Writer`` generates and records it, a file per batch. ``Features`` reads the files back as training batches.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.core.errors import ConfigError, RequestError
from forerun.core.folders import replace_with
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.engine.llm import LLM
from forerun.models.text.chat import Message, render_chat
from forerun.models.text.tokenizer import encode
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs
from forerun.speculate.verify import Verification
from forerun.tune.data import OPENING, every_fortieth, held_out_prompts, library_paragraphs, rendered
from forerun_lab.heads.training import TrainingBatch
from forerun_lab.tune.data import Data, user_turns

FOLLOW_UP_EVERY = 4
"""One conversation in this many gets a second user turn."""
SELF_WRITTEN_EVERY = 2
"""One conversation in this many begins with a user turn that the model wrote itself."""
SELF_WRITTEN_TOKENS = 96
"""Most tokens of such a turn; a longer one is dropped."""
PLACEHOLDER = "What does a user say?"
"""Marks a user turn's place in the chat template."""
ROWS = 48
"""Texts that are written together."""
TIMED = 24
"""Answers, and tokens of each, that measure the speed of writing."""
PROMPT_TAIL = 128
"""Tokens of a prompt in a training row: hidden states hold what came before."""
FOLLOW_UPS = (
    "Make it shorter.",
    "Can you explain the last point again?",
    "Give me an example.",
    "Thank you! Write it again in simpler words.",
    "Now list the most important points.",
    "Are you sure? Check your answer.",
    "Translate your answer into Spanish.",
    "Tell me more.",
)


@dataclass(frozen=True)
class RecordConfig(DrafterConfig):
    layers: tuple[int, ...] = ()
    """Hidden states to record, as ``Needs.hidden`` counts them."""


class HiddenStateRecorder(Drafter[RecordConfig]):
    """A drafter that drafts nothing and records the target's hidden states."""

    name = "record"
    config_class = RecordConfig

    def __init__(self, config: RecordConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.needs = Needs(hidden=tuple(config.layers))
        self.rows: dict[int, list[Tensor]] = {}
        self.done: dict[tuple[int, ...], Tensor] = {}
        """Hidden states of each finished sequence by its tokens, bfloat16 [tokens fed, layers * hidden size]."""

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in sequences]

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            if verdict.hidden is not None and verdict.error is None:
                parts = [verdict.hidden[layer] for layer in self.config.layers]
                self.rows.setdefault(sequence.id, []).append(torch.cat(parts, dim=-1).to(torch.bfloat16))

    def release(self, sequence: RequestState) -> None:
        rows = self.rows.pop(sequence.id, None)
        if rows:
            self.done[tuple(sequence.tokens)] = torch.cat(rows)

    def take(self, tokens: Sequence[int]) -> Tensor | None:
        """Remove and return the hidden states of a finished sequence."""
        return self.done.pop(tuple(tokens), None)


@dataclass
class Writer:
    """Generates text with ``llm``, whose hidden states ``record`` collects. Prompts have at most ``prompt`` tokens and
    answers at most ``answer``; ``rows`` texts are written together."""

    llm: LLM
    record: HiddenStateRecorder
    data: Data
    rows: int = ROWS
    answer: int = 256
    prompt: int = 700
    chats: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chats = bool(getattr(self.llm.tokenizer, "chat_template", None))

    def write_part(self, seed: int, temperature: float) -> dict[str, Any]:
        """One batch as ``Features`` reads it: ``tokens``, ``lengths``, ``prompts``, ``hidden`` and ``layers``."""
        rng = random.Random(seed)
        if not self.chats:
            return self._packed(self._completions(self._openings(seed), temperature, rng))
        first = max(1, self.rows * FOLLOW_UP_EVERY // (FOLLOW_UP_EVERY + 1))
        turns = self._self_written_turns(first // SELF_WRITTEN_EVERY, rng)
        turns += islice(self._turns(seed), first - len(turns))
        texts, conversations = [], []
        for ids, count, messages in self._chats(
            [[{"role": "user", "content": turn}] for turn in turns], temperature, rng
        ):
            texts.append((ids, count))
            conversations.append([*messages, {"role": "user", "content": rng.choice(FOLLOW_UPS)}])
        second = rng.sample(conversations, min(len(conversations), self.rows - first))
        texts += [(ids, count) for ids, count, _ in self._chats(second, temperature, rng)]
        return self._packed(texts)

    def read_part(self, answers: Sequence[Sequence[int]]) -> dict[str, Any]:
        """One batch, as of ``write_part``, of given answers of the model, each after ``prefix``."""
        prompts = [[*self.prefix, *answer][: self.max_read] for answer in answers]
        outputs = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        pairs = zip(prompts, outputs, strict=True)
        return self._packed([([*prompt, *out.outputs[0].token_ids], len(self.prefix)) for prompt, out in pairs])

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens before a given answer: an empty user turn or, without a chat template, the BOS token, if any."""
        if self.chats:
            return rendered(self.llm, [{"role": "user", "content": ""}])
        first = self.llm.encode("")[1][:1]
        return first if first == [self.llm.tokenizer.bos_token_id] else []

    @property
    def max_read(self) -> int:
        """Tokens of a given text that are read, at most; one more follows them."""
        return self.prompt + self.answer - 1

    def tokens_to_read(self, answers: Sequence[Sequence[int]]) -> int:
        """Tokens of the texts that ``read_part`` makes of the answers."""
        return sum(min(len(self.prefix) + len(answer), self.max_read) + 1 for answer in answers)

    def held_out_part(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """One batch of answers to held-out prompts, at temperatures 0 and 1."""
        texts = []
        for temperature in (0.0, 1.0):
            texts += self._completions(prompts, temperature, random.Random(0))
        return self._packed(texts)

    def speed(self, prompts: Sequence[list[int]]) -> float:
        """Tokens per second, prompts included, of short answers to a few of ``prompts``."""
        few = list(prompts[:: max(1, len(prompts) // TIMED)][:TIMED])
        began = time.monotonic()
        texts = self._completions(few, 0.0, random.Random(0), TIMED)
        self.record.done.clear()
        return sum(len(ids) for ids, _ in texts) / (time.monotonic() - began)

    def held_out_prompts(self) -> list[list[int]]:
        return held_out_prompts(self.llm, self.prompt, self.data.paragraphs)

    def _turns(self, seed: int) -> Iterator[str]:
        """Yields user turns: the data's own and generated ones alternate."""
        rng = random.Random(seed)
        for _, turn in user_turns(seed, self.data.paragraphs):
            if self.data.turns:
                yield rng.choice(self.data.turns)
            yield turn

    def _self_written_turns(self, count: int, rng: random.Random) -> list[str]:
        """At most ``count`` user turns that the model writes itself, where its template has the user speak (Magpie: Xu
        et al. 2024, arXiv 2406.08464)."""
        text = render_chat(self.llm.tokenizer, [{"role": "user", "content": PLACEHOLDER}])
        before, found, _ = text.partition(PLACEHOLDER)
        if not found:
            return []
        prompts = [encode(self.llm.tokenizer, before, add_special_tokens=False)] * count
        outputs = [text.outputs[0] for text in self._generate(prompts, 1.0, rng, SELF_WRITTEN_TOKENS)]
        self.record.done.clear()
        return [out.text.strip() for out in outputs if out.finish_reason == "stop" and out.text.strip()]

    def _openings(self, seed: int) -> list[list[int]]:
        """Beginnings of texts, none of which is held out."""
        rng = random.Random(seed)
        texts = [*(self.data.paragraphs or library_paragraphs()), *self.data.turns]
        excluded = set(every_fortieth(texts)) if len(texts) > 40 else set()
        usable = [text for text in texts if text not in excluded] or texts
        return [self.llm.encode(rng.choice(usable))[1][:OPENING] for _ in range(self.rows)]

    def _chats(
        self, conversations: Sequence[Sequence[Message]], temperature: float, rng: random.Random
    ) -> Iterator[tuple[list[int], int, list[Message]]]:
        """Yields each conversation with the model's answer: token ids, how many are the prompt's, and messages."""
        usable = []
        for messages in conversations:
            try:
                ids = rendered(self.llm, messages)
            except RequestError:  # the template leaves a turn out, or refuses it
                continue
            if len(ids) <= self.prompt:
                usable.append((messages, ids))
        for (messages, prompt), text in zip(usable, self._generate([ids for _, ids in usable], temperature, rng)):
            answer = {"role": "assistant", "content": text.outputs[0].text}
            yield [*prompt, *text.outputs[0].token_ids], len(prompt), [*messages, answer]

    def _completions(
        self, prompts: Sequence[list[int]], temperature: float, rng: random.Random, answer: int | None = None
    ) -> list[tuple[list[int], int]]:
        """Prompts with their answers: token ids, and how many are the prompt's."""
        texts = self._generate(prompts, temperature, rng, answer)
        return [([*prompt, *text.outputs[0].token_ids], len(prompt)) for prompt, text in zip(prompts, texts)]

    def _generate(
        self, prompts: Sequence[list[int]], temperature: float, rng: random.Random, answer: int | None = None
    ) -> list[Any]:
        longest = min(self.answer, answer or self.answer)
        params = [
            SamplingParams(temperature=temperature, max_tokens=longest, seed=rng.randrange(2**31)) for _ in prompts
        ]
        return self.llm.generate(list(prompts), params, use_tqdm=False) if prompts else []

    def _packed(self, texts: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
        """Texts with their recorded hidden states, if any; the last token's, which was never fed, is zero."""
        layers = list(self.record.config.layers)
        pad = torch.zeros(1, len(layers) * self.llm.model.info.hidden_size, dtype=torch.bfloat16)
        recorded = [
            (ids, count, self.record.take(ids) if layers else pad.expand(len(ids) - 1, 0)) for ids, count in texts
        ]
        whole = [(ids, count, rows) for ids, count, rows in recorded if rows is not None and len(rows) == len(ids) - 1]
        self.record.done.clear()
        return {
            "layers": layers,
            "tokens": torch.tensor([token for ids, _, _ in whole for token in ids], dtype=torch.int32),
            "lengths": torch.tensor([len(ids) for ids, _, _ in whole], dtype=torch.int32),
            "prompts": torch.tensor([count for _, count, _ in whole], dtype=torch.int32),
            "hidden": torch.cat([part for _, _, rows in whole for part in (rows, pad)] or [pad[:0]]),
        }


def save_part(part: dict[str, Any], path: Path) -> None:
    """Write a part, atomically."""
    replace_with(path, lambda temporary: torch.save(part, temporary))


class TextSpan(NamedTuple):
    """A conversation: its file and place there, its tokens, and how many of them are the prompt's."""

    part: int
    start: int
    length: int
    prompt: int


class Features:
    """Reads the parts in a folder, from disk as they are needed, or from a GPU's memory. Parts may be added."""

    def __init__(self, folder: Path, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self.folder, self.seed, self.device = folder, seed, torch.device(device)
        self.parts: list[dict[str, Any]] = []
        self.spans: list[TextSpan] = []
        self.names: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Load the files that are new."""
        for path in sorted(self.folder.glob("*.pt")):
            if path.name in self.names:
                continue
            part = torch.load(path, mmap=True, weights_only=True)
            part |= {name: part[name].to(self.device) for name in ("tokens", "hidden")}
            if self.parts and part["layers"] != self.parts[0]["layers"]:
                raise ConfigError(f"{path} holds other layers than the files before it")
            start = 0
            for length, prompt in zip(part["lengths"].tolist(), part["prompts"].tolist()):
                self.spans.append(TextSpan(len(self.parts), start, length, prompt))
                start += length
            self.parts.append(part)
            self.names.add(path.name)

    @property
    def layers(self) -> list[int]:
        return list(self.parts[0]["layers"])

    def counts(self, vocabulary: int) -> Tensor:
        """Frequency of each token in the answers, int64 [vocabulary]."""
        total = torch.zeros(vocabulary, dtype=torch.long, device=self.device)
        for tokens in self.answers():
            total += torch.bincount(tokens.long(), minlength=vocabulary)
        return total

    def answers(self) -> Iterator[Tensor]:
        """Yields the token ids of each conversation's last answer."""
        for span in self.spans:
            yield self.parts[span.part]["tokens"][span.start + span.prompt : span.start + span.length]

    def sample(self, tokens: int) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """Yields conversations of ``tokens`` tokens in all: the part, and a ``TextSpan``'s start, length and prompt."""
        for span in self.spans:
            if tokens <= 0:
                return
            tokens -= span.length
            yield self.parts[span.part], span.start, span.length, span.prompt

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Rows of random conversations end to end, as indices, int64 [rows, length, 3]. An index is a token's part, its
        place there, and the conversation's number in the row << 20 plus its prompt tokens. Which conversations are
        drawn depends on ``consumed``, the tokens before this batch."""
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {consumed}".encode()))
        if consumed % (8 * rows * length) == 0:
            self.refresh()
        out = torch.empty(rows, length, 3, dtype=torch.long)
        for row in range(rows):
            column, number = 0, 0
            while column < length:
                span = self.spans[int(torch.randint(len(self.spans), (), generator=rng))]
                skip = max(0, span.prompt - PROMPT_TAIL)
                count = min(span.length - skip, length - column)
                out[row, column : column + count, 0] = span.part
                out[row, column : column + count, 1] = torch.arange(count) + span.start + skip
                out[row, column : column + count, 2] = number * (1 << 20) + span.prompt - skip
                column, number = column + count, number + 1
        return out

    def lesson(
        self, indices: Tensor, target: PreTrainedModel, embedding: Tensor, head: Tensor, narrow: bool
    ) -> TrainingBatch:
        """The training batch at ``indices`` (``batch``). ``head`` reads hidden states; it has the rows of the draft
        vocabulary alone if ``narrow``."""
        indices = indices.to(self.device)
        rows, length, _ = indices.shape
        tokens = indices.new_empty(rows * length)
        wide = tokens.new_empty(rows * length, self.parts[0]["hidden"].shape[1], dtype=torch.bfloat16)
        flat = indices.view(-1, 3)
        for part in flat[:, 0].unique().tolist():
            of_part = flat[:, 0] == part
            places = flat[of_part, 1]
            tokens[of_part] = self.parts[part]["tokens"][places].long()
            wide[of_part] = self.parts[part]["hidden"][places]
        states = wide.view(rows, length, -1).float().chunk(len(self.layers), dim=-1)
        segments = indices[..., 2] >> 20
        prompt = indices[..., 2] & ((1 << 20) - 1)
        offsets = torch.arange(length, device=self.device) - _starts(segments)
        return TrainingBatch(
            tokens=tokens.view(rows, length),
            hidden=dict(zip(self.layers, states)),
            logits=None,
            embedding=embedding,
            head=head,
            target=target,
            segments=segments,
            answers=offsets >= prompt,
            reduced_vocabulary=narrow,
        )


def _starts(segments: Tensor) -> Tensor:
    """Index of each token's conversation's first token, int64 [rows, length]."""
    length = segments.shape[1]
    new = torch.ones_like(segments, dtype=torch.bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(new, torch.arange(length, device=new.device), 0).cummax(dim=1).values
