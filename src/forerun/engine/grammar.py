"""Structured output: answers that a JSON schema, a regular expression, a list of choices or a grammar permits.

Masks come from llguidance (https://github.com/guidance-ai/llguidance). A constraint gives a mask for every row: for the
state after a sequence's committed tokens and the row's drafted path. It catches up with committed tokens as drafters
do, so that a rejected draft leaves no trace in it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from forerun.core.errors import ConfigError, RequestError, check_text
from forerun.core.request import RequestState
from forerun.engine.schemas import COMPACT, grammars
from forerun.models.text.reasoning import Boundary
from forerun.sampling.params import StructuredOutputsParams

LONG = re.compile(r"\d{16}")
"""Found in every integer beyond 2^53, which float64 may not hold."""
MOST_ITEMS = 10_000
"""Parser items of one step, during which all requests wait. Ambiguous grammars take up to 0.01 s with it (0.7 s with
llguidance's default of 50,000); schemas of sixty alternatives need a tenth of it. One row may have a tenth of it."""
MOST_RULES = 1000
"""Rules of a Lark or GBNF grammar. llguidance follows rules recursively, and 4,000 in a row overflow the stack."""
LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')
"""Strings and regular expressions of such a grammar."""
MARKER = b"\xff"
"""llguidance's prefix for tokens that no text spells."""
FULL = "too many states"
"""In llguidance's error for a lexer that has reached its limit of states."""


@dataclass(frozen=True)
class GrammarCost:
    """Limits of a compiled grammar, by the length of its text in bytes.

    Rounded up from ten kinds of grammars of 1 to 500 kB: 1 kB a symbol, 1.4 kB a state, 100 bytes a character.
    """

    symbols: int
    states: int
    memory: int

    @classmethod
    def of(cls, size: int) -> GrammarCost:
        symbols, states = 2000 + size // 2, 8192 + size // 2
        return cls(symbols, states, 1024 * symbols + 1536 * states + 128 * size)


class GrammarConstraint:
    """One sequence's state in its grammar: a copy of the compiled matcher.

    The copy is made for the first mask, so that waiting requests have none. A matcher that exceeds its limits stays
    broken. If drafted tokens broke it, a new copy follows the committed tokens. If all copies together have used up
    the states of the lexer that they share, the grammar is compiled anew.
    """

    def __init__(self, compiler: GrammarCompiler, options: StructuredOutputsParams) -> None:
        self._compiler = compiler
        self._options = options
        self._fed = 0
        """Committed output tokens seen; the matcher has no tokens after the end of the text."""
        self._ends = compiler.ends
        self._dead = False
        """Committed tokens have broken the matcher."""
        self._given_up = -1
        """Value of ``_fed`` at which even a newly compiled matcher had too few states."""
        self._masks: dict[tuple[int, ...], torch.Tensor | None] = {}
        self._faults: dict[tuple[int, ...], str] = {}

    @cached_property
    def _start(self) -> Any:
        return self._compiler.compile(self._options)

    @cached_property
    def _matcher(self) -> Any:
        return self._start.deep_copy()

    def allowed(self, sequence: RequestState, path: Sequence[int]) -> torch.Tensor | None:
        """The mask of tokens that may follow ``path``: int32 [ceil(vocabulary / 32)], lowest bit first.

        None if ``path`` itself is not permitted.
        """
        path = self._catch_up(sequence) + tuple(path)
        if path not in self._masks:
            self._masks[path], broken = self._look(sequence, path)
            if broken is not None and FULL in broken and self._given_up != self._fed:
                self._renew(sequence)
                self._masks[path], broken = self._look(sequence, path)
                self._given_up = self._fed if broken is not None else -1
            if broken is not None:
                self._faults[path] = f"the grammar: {broken}"
        return self._masks[path]

    def _look(self, sequence: RequestState, path: Sequence[int]) -> tuple[torch.Tensor | None, str | None]:
        """The mask after ``path`` (None if that is not permitted), and the matcher's error there, if any."""
        consumed = 0 if self._matcher.is_stopped() else self._matcher.try_consume_tokens(list(path))
        mask, broken = None, None
        if consumed == len(path) or self._over(path[consumed:]):
            mask, broken = permitted(self._matcher, self._ends)
        else:  # the path is not permitted, or the lexer is full, which only computing a mask reveals
            _, error = permitted(self._matcher, self._ends)
            broken = error if error is not None and FULL in error else None
        self._undo(sequence, consumed)
        return mask, broken

    def _renew(self, sequence: RequestState) -> None:
        self._start = self._compiler.compile(self._options, instead_of=self._start)
        self._dead = False
        self._follow(sequence)

    def _follow(self, sequence: RequestState) -> None:
        """Replaces the matcher by a new copy that has consumed the committed tokens."""
        self._matcher = self._start.deep_copy()
        self._take(sequence.tokens[sequence.num_prompt :][: self._fed])

    def _take(self, tokens: list[int]) -> None:
        """Consumes committed tokens up to the end of the text; one that is not permitted breaks the matcher."""
        consumed = 0 if self._matcher.is_stopped() else self._matcher.try_consume_tokens(tokens)
        if consumed < len(tokens) and not self._over(tokens[consumed:]):
            permitted(self._matcher, self._ends)  # only computing a mask reveals that the lexer is full
            if self._matcher.consume_token(tokens[consumed]):
                self._take(tokens[consumed + 1 :])
        self._dead = self._matcher.is_error()

    def _over(self, tokens: Sequence[int]) -> bool:
        """Whether the text has ended before these tokens, which end it again."""
        return self._matcher.is_stopped() and all(token in self._compiler.eos_ids for token in tokens)

    def fault(self, sequence: RequestState, path: Sequence[int]) -> str | None:
        """The grammar's error after ``path``, if there is one."""
        self.allowed(sequence, path)
        return self._faults.get(self._catch_up(sequence) + tuple(path))

    def forced(self, sequence: RequestState, count: int) -> list[int]:
        """Up to ``count`` next tokens that the grammar leaves no choice about, as the tokenizer splits them."""
        consumed = 0
        result = list(self._catch_up(sequence))
        tentative = len(result)
        if result:
            consumed = self._matcher.try_consume_tokens(result)
        while consumed == len(result) and len(result) - tentative < count:
            more = self._matcher.compute_ff_tokens() or self._single()
            if not more:
                break
            result += more
            consumed += self._matcher.try_consume_tokens(more)
        self._undo(sequence, consumed)
        return result[tentative : tentative + count]

    def _single(self) -> list[int]:
        """The permitted token, if there is only one."""
        mask, _ = permitted(self._matcher, self._ends)
        words = mask.nonzero()[:, 0].tolist()
        if len(words) != 1:
            return []
        word = int(mask[words[0]]) & 0xFFFFFFFF
        return [32 * words[0] + word.bit_length() - 1] if word & (word - 1) == 0 else []

    def _catch_up(self, sequence: RequestState) -> tuple[int, ...]:
        """Consumes new committed tokens; returns the tentative ones at the end, which may still be taken back."""
        committed = len(sequence.tokens) - sequence.tentative
        fresh = sequence.tokens[sequence.num_prompt + self._fed : committed]
        if fresh:
            self._masks.clear()
            self._faults.clear()
            self._fed += len(fresh)
            self._take(fresh)
        return tuple(sequence.tokens[committed:])

    def _undo(self, sequence: RequestState, consumed: int) -> None:
        """Rolls back tokens that are not committed, or replaces the matcher if they broke it."""
        if not self._matcher.is_error():
            self._matcher.rollback(consumed)
        elif not self._dead:
            self._follow(sequence)


class AfterThoughts:
    """One sequence's grammar for a model that thinks first: the grammar begins after the thoughts.

    Thoughts are free, but the answer cannot end within them.
    """

    def __init__(self, grammar: GrammarConstraint, boundary: Boundary, ends: torch.Tensor) -> None:
        self._grammar = grammar
        self._boundary = boundary
        self._free = ~ends
        self._begins: int | None = None
        """Index of the grammar's first token, once that is committed."""
        self._prompt: tuple[bool | None] | None = None
        """Whether the prompt opens the thoughts (None in it: the answer may), once it was looked at."""
        self._seen = 0
        """Committed output tokens that have been searched for the end of the thoughts."""

    def allowed(self, sequence: RequestState, path: Sequence[int]) -> torch.Tensor | None:
        inner, path, choice = self._inside(sequence, path)
        if inner is None:
            return self._free
        mask = self._grammar.allowed(inner, path)  # type: ignore[arg-type]
        if mask is None or not choice:
            return mask
        mask = mask.clone()
        start = self._boundary.start[0]
        mask[start // 32] |= _bit(start)
        return mask

    def fault(self, sequence: RequestState, path: Sequence[int]) -> str | None:
        inner, path, choice = self._inside(sequence, path)
        return None if inner is None or choice else self._grammar.fault(inner, path)  # type: ignore[arg-type]

    def forced(self, sequence: RequestState, count: int) -> list[int]:
        inner, path, choice = self._inside(sequence, ())
        return [] if inner is None or path or choice else self._grammar.forced(inner, count)  # type: ignore[arg-type]

    def _inside(self, sequence: RequestState, path: Sequence[int]) -> tuple[_View | None, Sequence[int], bool]:
        """Maps a sequence and a drafted path to those of the grammar.

        Returns:
            The sequence as the grammar sees it (None within the thoughts), the path after it, and whether the answer
            may still choose to think.
        """
        first, tokens = sequence.num_prompt, sequence.tokens
        committed = len(tokens) - sequence.tentative
        if self._prompt is None:
            self._prompt = (self._boundary.opened(tokens[:first]),)
        (opened,) = self._prompt
        if opened is None and committed > first:
            opened = tokens[first] == self._boundary.start[0]
        if opened is False:
            self._begins = first
        if self._begins is None and opened:
            output = tokens[first:committed]
            ended = self._boundary.ends_at(output, self._seen)
            self._seen = len(output)
            self._begins = None if ended is None else first + ended
        if self._begins is not None:
            return _View(tokens, self._begins, sequence.tentative), path, False
        tail = [*tokens[committed:], *path]
        base = _View(tokens[:committed], committed, 0)
        if opened is None and tail[:1] != [self._boundary.start[0]]:  # nothing is committed yet
            return base, tail, not tail
        output = tokens[first:committed]
        ended = self._boundary.ends_at([*output, *tail], len(output))
        return (None, (), False) if ended is None else (base, tail[ended - len(output) :], False)


@dataclass(frozen=True)
class _View:
    """The part of a ``RequestState`` that a constraint reads; its output begins at ``num_prompt``."""

    tokens: list[int]
    num_prompt: int
    tentative: int


def permitted(matcher: Any, ends: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """The mask of tokens that may follow (``ends`` once the text is complete), and the error that permits none."""
    if matcher.is_stopped() and not matcher.is_error():
        return ends, None
    mask = torch.zeros_like(ends)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), 4 * len(mask))
    if matcher.is_error():  # computing the mask may have broken it
        return torch.zeros_like(ends), _first_line(matcher.get_error())
    return mask, None


class Spelling:
    """A tokenizer for llguidance whose ids spell exactly a text's bytes. Raises ValueError if tokens are not bytes.

    The tokenizer's own ids may not: it may read ``<|im_end|>`` as a special token, and a normalizer may change the
    text. A grammar follows the text and would reject such tokens.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: list[int]) -> None:
        import llguidance.hf

        tokenizer = getattr(tokenizer, "full", tokenizer)
        own = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids, slices=[])
        ordinary = {token for token, one in tokenizer.added_tokens_decoder.items() if not one.special} - set(eos_ids)
        """Added tokens that are ordinary text, such as Qwen's ``<tool_call>``."""
        special = [own.is_special_token(token) and token not in ordinary for token in range(vocab_size)]
        self.tokens = [MARKER * marked + own.decode_bytes([token]) for token, marked in enumerate(special)]
        self.eos_token_id = eos_ids[0]
        self._own = own

    def __call__(self, text: str) -> list[int]:
        """The tokenizer's own ids; where they do not spell the text, those of its halves."""
        ids = self._own.tokenize_str(text)
        if b"".join([self.tokens[token] for token in ids]) == text.encode():
            return ids
        if len(text) == 1:
            return self._own.greedy_tokenize(text)
        half = len(text) // 2
        return self(text[:half]) + self(text[half:])


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the latest. Safe to call from any thread.

    Args:
        longest: bytes of the longest grammar that is accepted.
        memory: bytes of the kept grammars, by what each may grow to.
        reasoning_parser: grammars begin after the model's thoughts, which this parser finds.

    Raises:
        ConfigError: llguidance is missing or cannot read the tokenizer.
        RequestError: a grammar is wrong, too large or uses unsupported features; nothing in a schema is ignored.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int], *, longest: int = 65536, memory: int = 512 << 20,
        reasoning_parser: str | None = None,
    ) -> None:  # fmt: skip
        try:
            import llguidance
        except ImportError:
            raise ConfigError("structured output needs llguidance: pip install 'forerun[serve]'") from None
        if tokenizer is None or not eos_ids:
            raise ConfigError("structured output needs a tokenizer and a token that ends the text")
        self.eos_ids = sorted(eos_ids)
        self.longest = longest
        self.memory = memory
        self.ends = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        for token in self.eos_ids:
            self.ends[token // 32] |= _bit(token)
        self._boundary = None if reasoning_parser is None else Boundary(tokenizer, reasoning_parser)
        self._library = llguidance
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()
        self.cached_bytes = 0
        """Bytes that the kept grammars may grow to."""
        try:
            spelling = llguidance.TokenizerWrapper(Spelling(tokenizer, vocab_size, self.eos_ids))
            self._tokenizer = llguidance.LLTokenizer(spelling, eos_token=self.eos_ids)
        except ValueError as error:
            raise ConfigError(f"structured output cannot read this tokenizer: {_first_line(str(error))}") from error

    def start(self, options: StructuredOutputsParams) -> GrammarConstraint | AfterThoughts:
        """Compiles a grammar and returns a new sequence's constraint."""
        self.compile(options)
        grammar = GrammarConstraint(self, options)
        return grammar if self._boundary is None or options.whole else AfterThoughts(grammar, self._boundary, self.ends)

    def compile(self, options: StructuredOutputsParams, *, instead_of: Any = None) -> Any:
        """The grammar's matcher, to be copied; a new one in place of ``instead_of``. A schema can take a second,
        without the GIL."""
        key = options.key
        with self._lock:
            if key in self._cache and self._cache[key][0] is not instead_of:
                self._cache.move_to_end(key)
                return self._cache[key][0]
        check_text(key[1], "structured_outputs")
        size = len(key[1].encode())
        if size > self.longest:
            raise RequestError(f"structured output, {key[0]}: {size} bytes exceed max_grammar_bytes {self.longest}")
        cost = GrammarCost.of(size)
        matcher = self._compile(*key, cost)
        with self._lock:
            self._drop(key)
            self._cache[key] = matcher, cost.memory
            self.cached_bytes += cost.memory
            while self.cached_bytes > self.memory:
                self._drop(next(iter(self._cache)))
        return matcher

    def _drop(self, key: tuple[str, str]) -> None:
        _, memory = self._cache.pop(key, (None, 0))
        self.cached_bytes -= memory

    def _compile(self, kind: str, text: str, cost: GrammarCost) -> Any:
        library = self._library
        lark, schemas = json.loads(text) if kind == "schemas" else (text, {})
        if kind in ("grammar", "schemas") and len(re.findall("::=|:", LITERALS.sub("", lark))) > MOST_RULES:
            raise RequestError(f"structured output, grammar: more than {MOST_RULES} rules")
        try:
            if kind == "schemas":
                grammar = _with_schemas({"name": "start", "lark_grammar": lark}, schemas)
            elif kind == "json" and LONG.search(text):
                grammar = _with_schemas(
                    {"name": "start", "lark_grammar": "start: @schema"}, {"schema": json.loads(text)}
                )
            elif kind == "json":
                grammar = library.LLMatcher.grammar_from_json_schema(_as_object(text), defaults=COMPACT)
            else:
                grammar = library.grammar_from(kind, text)
        except ValueError as error:
            raise RequestError(f"structured output, {kind}: {_first_line(str(error))}") from None
        limits = library.LLParserLimits(
            step_max_items=MOST_ITEMS, max_items_in_row=MOST_ITEMS // 10, max_grammar_size=cost.symbols,
            max_lexer_states=cost.states,
        )  # fmt: skip
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        for _ in range(2):  # copies share the lexer: the first one may have used up its states
            _, broken = permitted(matcher.deep_copy(), self.ends)
            if broken is not None:
                raise RequestError(f"structured output, {kind}: {broken}")
        return matcher


def _with_schemas(start: dict[str, Any], schemas: dict[str, Any]) -> str:
    """llguidance's grammar list of a Lark grammar and the JSON schemas that its rules name."""
    named = [grammar for name, schema in schemas.items() for grammar in grammars(name, schema)]
    return json.dumps({"grammars": [start, *named]})


def _as_object(schema: str) -> str:
    """Replaces a schema that is ``true``, which llguidance does not take. Raises RequestError for ``false``."""
    if schema.strip() == "false":
        raise RequestError("structured output, json: no answer can match the schema false")
    return "{}" if schema.strip() == "true" else schema


def _bit(token: int) -> int:
    """The bit of ``token`` in its mask word, as a signed 32-bit integer."""
    return (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)


def _first_line(text: str) -> str:
    """The first line of a message that may be followed by a dump of the parser."""
    lines = [line.strip() for line in text.split("<state>")[0].splitlines() if line.strip()]
    return " ".join(lines[:4])[:300] or "unknown error"
