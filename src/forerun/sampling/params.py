"""Sampling options of one request; names and defaults are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from json import dumps
from numbers import Integral
from typing import Any

from forerun.core.config import (
    COUNT,
    FRACTION,
    POSITIVE_FRACTION,
    Within,
    check_seed,
    check_types,
    check_within,
    convert_fields,
    option,
    to_python,
)
from forerun.core.errors import ConfigError, shown

LARGEST = 1e30
"""The largest temperature, penalty and bias; 1 / LARGEST is the smallest. Far beyond, float32 overflows."""
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MOST_ANSWERS = 16384
"""Most answers of one request, as in vLLM: each takes memory from the start."""

COLDEST = 1e-5
"""Requests of a lower temperature are greedy: logits divided by much less overflow."""
STEEPEST = 10.0
"""The largest length penalty, positive or negative, by which no length overflows."""
ID = Within(least=0, whole=True)
LIMITS = {
    "n": Within(least=1, most=MOST_ANSWERS, whole=True),
    "temperature": Within(least=0, most=LARGEST),
    "top_k": Within(least=-1, whole=True),
    "top_p": POSITIVE_FRACTION,
    "min_p": FRACTION,
    "max_tokens min_indent": COUNT,
    "min_tokens logprobs prompt_logprobs": Within(least=0, whole=True),
    "repetition_penalty": Within(least=1 / LARGEST, most=LARGEST),
    "presence_penalty frequency_penalty": Within(least=-2, most=2),
}
BEAM_LIMITS = {
    "beam_width": LIMITS["n"],
    "max_tokens num_return_sequences": COUNT,
    "length_penalty": Within(least=-STEEPEST, most=STEEPEST),
}


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, (Sequence, Set)):
        raise ConfigError(f"{name} must be a list, not {shown(value)}")
    return tuple(to_python(item) for item in value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    tokens = _tuple(name, value)
    for token in tokens:
        if not ID.permits(token):
            raise ConfigError(f"each of {name} must be {ID}, not {shown(token)}")
    return tokens


def _texts(name: str, value: Any, kind: str) -> tuple[str, ...]:
    texts = _tuple(name, value)
    if any(not isinstance(text, str) or not text for text in texts):
        raise ConfigError(f"{name} must be {kind}")
    return texts


def _bias(given: Any) -> dict[int, float]:
    """Checks ``logit_bias``, whose ids may be text, as in JSON."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"logit_bias maps token ids to numbers, not {shown(given)}")
    result: dict[int, float] = {}
    for key, value in given.items():
        text = str(key)
        if not (isinstance(key, (str, Integral)) and text.isascii() and text.isdecimal() and len(text) <= 10):
            raise ConfigError(f"logit_bias maps token ids to numbers: {text[:40]!r} is not a token id")
        if int(text) in result:
            raise ConfigError(f"logit_bias names token id {int(text)} twice")
        try:
            result[int(text)] = float(value)
        except (TypeError, ValueError, OverflowError):
            result[int(text)] = math.nan
        if not result[int(text)] <= LARGEST:
            raise ConfigError(
                f"logit_bias maps token ids to numbers of at most {LARGEST:g}, not {shown(key)}: {shown(value)}"
            )
    return result


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the answer must look like: exactly one of vLLM's kinds. Works with any drafter and acceptance rule.

    ``json`` is a schema, as a mapping, as text, or True for any JSON; ``regex`` must match the whole answer; ``choice``
    lists the answers; ``grammar`` is Lark or GBNF, in which ``@name`` stands for one of ``schemas``; ``json_object``
    permits any JSON object. Raises ConfigError for none or several of them. Errors in the grammar itself are found when
    a request is added.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    schemas: Mapping[str, Any] | None = None
    """JSON schemas by name, for the rules of a Lark ``grammar``."""
    whole: bool = False
    """Whether the grammar covers the model's reasoning as well, instead of beginning after it."""

    def __post_init__(self) -> None:
        absent = {"json_object": (None, False)}  # a schema may be False
        kinds = [f.name for f in fields(self) if f.name not in ("schemas", "whole")]
        given = [name for name in kinds if getattr(self, name) not in absent.get(name, (None,))]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs takes exactly one of json, regex, choice, grammar and json_object, not "
                f"{' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise ConfigError(f"structured_outputs: {name} must be a string")
        if self.json is not None and not isinstance(self.json, (str, Mapping, bool)):
            raise ConfigError("structured_outputs: json must be a schema, as a mapping or as text")
        if self.choice is not None:
            choice = [self.choice] if isinstance(self.choice, str) else list(self.choice)
            if not choice or any(not isinstance(text, str) or not text for text in choice):
                raise ConfigError("structured_outputs: choice must be a list of non-empty strings")
            object.__setattr__(self, "choice", tuple(choice))
        if self.schemas is not None and (self.grammar is None or not isinstance(self.schemas, Mapping)):
            raise ConfigError("structured_outputs: schemas are JSON schemas by name, for a grammar")

    @property
    def key(self) -> tuple[str, str]:
        """Kind and text, by which compiled grammars are cached. Raises ConfigError for what JSON cannot spell."""
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else _written(self.json)
        if self.choice is not None:
            return "choice", _written(self.choice)
        if self.regex is not None:
            return "regex", self.regex
        if self.schemas is not None:
            return "schemas", _written([self.grammar, self.schemas])
        return "grammar", self.grammar or ""


def _written(value: Any) -> str:
    try:
        return dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"structured_outputs cannot be written as JSON: {error}") from None


def _structured(given: Mapping[str, Any] | StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    known = {field.name for field in fields(StructuredOutputsParams)}
    if not isinstance(given, Mapping) or set(given) - known:
        raise ConfigError(f"structured_outputs has the fields {', '.join(sorted(known))}, not {shown(given)}")
    return StructuredOutputsParams(**given)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Every option works under speculation.

    Order of the transforms, as in vLLM: allowed ids, logit bias, bad words and min_tokens; penalties (repetition over
    prompt and output, presence and frequency over output); temperature; min-p; top-k; top-p. ``temperature`` 0 is
    greedy; one below 1e-5 is stored as 0.0. Strings and ids of ``stop`` and ``stop_token_ids`` end the answer.

    Args:
        n: answers, each with noise of its own; the first is that of ``n=1``.
        top_k: likeliest tokens that are kept; 0 or -1: all.
        top_p: share of the probability that is kept, in (0, 1].
        min_p: least probability of a token over the likeliest one's, in [0, 1].
        seed: 64 bits, from -2^63 to 2^64 - 1; a negative one stands for itself plus 2^64. None and -1 draw a fresh one.
        max_tokens: most tokens of an answer; None: up to ``max_model_len``.
        logprobs: how many of the likeliest tokens are listed beside each; natural logarithms.

    Raises:
        ConfigError: a value is out of range.
    """

    n: int = option(1, "Number of answers, each with its own seed.")
    temperature: float = option(1.0, "Sampling temperature. 0, or less than 1e-05, is greedy.")
    top_k: int = option(0, "Sample from the k likeliest tokens. 0: all.")
    top_p: float = option(1.0, "Sample from the likeliest tokens whose probabilities add up to this.")
    min_p: float = option(0.0, "Minimum probability of a token, relative to the likeliest one.")
    seed: int | None = option(
        None, "Random seed. The same seed gives the same text with and without speculation (rule coupled)."
    )
    max_tokens: int | None = option(16, "Maximum number of tokens in the answer.")
    min_tokens: int = option(0, "Minimum number of tokens in the answer.")
    stop: str | Sequence[str] | None = option(None, "Stop string.")
    stop_token_ids: Sequence[int] | None = option(None, "Token id that stops the answer.")
    include_stop_str_in_output: bool = option(False, "Keep the stop string in the answer.")
    min_indent: int | None = option(
        None, "Stop before a line that is indented by fewer characters, once there is text (llama.cpp's n_indent)."
    )
    ignore_eos: bool = option(False, "Continue after the end-of-text token.")
    repetition_penalty: float = option(
        1.0, "Penalty for tokens of the prompt and answer. Above 1, they become less likely."
    )
    presence_penalty: float = option(0.0, "Subtracted once from logits of tokens that the answer already has.")
    frequency_penalty: float = option(0.0, "Subtracted from logits for each occurrence in the answer.")
    logit_bias: Mapping[int, float] | None = option(None, "Added to logits: {token id: value}.")
    allowed_token_ids: Sequence[int] | None = option(
        None, "Only these token ids may be generated. Include the EOS id if the answer may end."
    )
    bad_words: Sequence[str] | None = option(None, "Text that must not be generated, with or without a leading space.")
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear; the engine, which has the tokenizer, adds those of ``bad_words``."""
    logprobs: int | None = option(
        None, "Return log-probabilities of each token and of this many of the likeliest (see --logprobs-mode)."
    )
    prompt_logprobs: int | None = option(None, "Return the same for prompt tokens, always raw.")
    truncate_prompt_tokens: int | None = option(
        None, "Keep only this many tokens at the end of the prompt. -1: what leaves room for max_tokens."
    )
    skip_special_tokens: bool = option(True, "Remove special tokens from the text.")
    structured_outputs: Mapping[str, Any] | StructuredOutputsParams | None = option(
        None, "Constrain the answer: one of json, regex, choice, grammar, json_object."
    )

    def __post_init__(self) -> None:
        convert_fields(self)
        check_types(SamplingParams, vars(self))
        check_within(self, LIMITS)
        check_seed(self.seed)
        if self.truncate_prompt_tokens != -1:
            check_within(self, {"truncate_prompt_tokens": COUNT})
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({shown(self.min_tokens)}) exceeds max_tokens ({shown(self.max_tokens)})")
        self._freeze()

    def _freeze(self) -> None:
        """Normalises options that have several spellings, so that equal options compare equal."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = tuple(dict.fromkeys(_ids("allowed_token_ids", allowed)))
            if not allowed:
                raise ConfigError("allowed_token_ids must not be empty: add ids or remove it")
        object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        banned = tuple(_ids("bad_words_ids", word) for word in _tuple("bad_words_ids", self.bad_words_ids))
        if not all(banned):
            raise ConfigError("bad_words_ids must be a list of non-empty lists of token ids")
        frozen: list[tuple[str, Any]] = [
            *((name, float(getattr(self, name))) for name in NUMBERS),  # tensors take no large integers
            ("temperature", float(self.temperature) if self.temperature >= COLDEST else 0.0),
            ("stop", _texts("stop", stop, "a non-empty string or a list of them")),
            ("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", _bias(self.logit_bias or {}) or None),
            ("allowed_token_ids", allowed),
            ("bad_words", _texts("bad_words", self.bad_words, "a list of non-empty strings")),
            ("bad_words_ids", banned),
        ]
        for name, value in frozen:
            object.__setattr__(self, name, value)

    @property
    def grammar(self) -> StructuredOutputsParams | None:
        """``structured_outputs`` as an object."""
        return _structured(self.structured_outputs)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def stops_in_text(self) -> bool:
        """Whether the answer's text must be read to find its end."""
        return bool(self.stop) or self.min_indent is not None

    @cached_property
    def penalised(self) -> bool:
        """Whether there are penalties on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def edits(self) -> bool:
        """Whether raw logits are changed before the temperature."""
        if self.penalised or self.logit_bias or self.bad_words_ids or self.allowed_token_ids:
            return True
        return self.min_tokens > 0 or self.structured_outputs is not None

    @cached_property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with other values for some fields. Raises ConfigError."""
        unknown = set(changes) - set(self.names())
        if unknown:
            raise ConfigError(
                f"SamplingParams has no field {sorted(unknown)[0]!r}: choose one of {', '.join(self.names())}"
            )
        return replace(self, **changes)

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


@dataclass(frozen=True)
class BeamSearchParams:
    """Options of a beam search. Beams are not sampled: there is no temperature, top-p, penalty or grammar.

    ``length_penalty``: finished beams are ranked by log-probability / tokens ** length_penalty. ``early_stopping``:
    True ends the search when ``beam_width`` beams have finished; False, when the best live beam would not rank among
    them at its present length; ``never``, when it could not at any length. Raises ConfigError.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    """Whether to go on after the end-of-text token."""
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Whether to keep the token that ended a beam."""
    early_stopping: bool | str = False
    num_return_sequences: int | None = None
    """How many of the best beams are returned; None: all ``beam_width``."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_within(self, BEAM_LIMITS)
        check_types(BeamSearchParams, vars(self))
        if self.n > self.beam_width:
            raise ConfigError(f"num_return_sequences {self.n} exceeds beam_width {self.beam_width}")
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise ConfigError(f"beam search does not sample: temperature must be 0, not {shown(self.temperature)}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ConfigError(f"early_stopping must be true, false or 'never', not {shown(self.early_stopping)}")

    @property
    def n(self) -> int:
        """How many answers are returned."""
        return self.beam_width if self.num_return_sequences is None else self.num_return_sequences

    @property
    def each(self) -> SamplingParams:
        """The options of each beam, for drafters and the engine: a greedy request."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


Params = SamplingParams | BeamSearchParams
"""How a request is answered: sampled, or searched."""
