"""Tokenizers from GGUF files: byte-level BPE, with the pre-tokenizer in ``tokenizer.ggml.pre``, and SentencePiece's,
which merges the pair whose union has the highest score first. Gemma 4's files list merges, not scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from forerun.core.errors import ModelError, shown
from forerun.models.architectures.families import PHI3
from forerun.models.architectures.gguf_config import ENDS, special_id

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Values of ``tokenizer.ggml.token_type``. Control and user-defined tokens are matched before the text is split."""
SPACE = "\u2581"
LISTED_MERGES = "gemma4"
"""The ``tokenizer.ggml.model`` of SentencePiece's kind with a list of merges."""
COPY = "__deepcopy__"
INFILL_KEYS = {
    "prefix": ("fim_pre", "prefix"), "suffix": ("fim_suf", "suffix"), "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",), "file": ("fim_sep",), "pad": ("fim_pad",),
}  # fmt: skip
"""The keys of tokens that fill in the middle, by role, the newest first: ``tokenizer.ggml.fim_pre_token_id``."""
PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's added tokens that do not strip the spaces after them."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _MARKS
_QWEN2 = _WORDS + r"\p{N}" + _MARKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED, _CAPITALS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{few}{_LOWER}{many}" for few, many in ("*+", "+*"))
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = f"{_CAPITALISED}{_ENDINGS}?|{_CAPITALS}{_ENDINGS}?|" + r"\p{N}{1,3}" + _SLASHED
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_TEKKEN = f"{_CAPITALISED}|{_CAPITALS}|" + r"\p{N}" + _SLASHED
_SEED = _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_JOINED = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _JOINED)
_THREE_DIGITS = r"[0-9][0-9][0-9]"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
"""Code points in hexadecimal."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is split before BPE: by one pattern after the other, into matches and what is between them."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """Texts begin with BOS unless the file says otherwise."""
    nfc: bool = False
    """Texts are normalized to NFC first."""


def _ranges(hexadecimal: str) -> str:
    """Ranges of code points, as a pattern has them in brackets."""
    return "".join("-".join(chr(int(end, 16)) for end in ends.split("-")) for ends in hexadecimal.split())


_LLAMA3_RULES = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "granite-docling"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((_GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone"), PreTokenizer((r"\p{N}", _GPT2))),
    **dict.fromkeys(("smaug-bpe", "glm4"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    **dict.fromkeys(("dbrx", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral"), _LLAMA3_RULES),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "hunyuan"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK_V3)),
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_ranges(_DEEPSEEK_LETTERS)}]+", rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
}
"""By ``tokenizer.ggml.pre``."""


class GGUFTokenizer:
    """The methods of a tokenizer that every request needs, without importing transformers, which takes a second.
    ``full`` is transformers' tokenizer around the same ``backend_tokenizer``; it has everything else."""

    def __init__(self, backend: Tokenizer, named: Mapping[str, Any], chat_template: str | None) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._named = dict(named)
        self.all_special_tokens = list(dict.fromkeys(t for k, t in named.items() if k.endswith("_token")))
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = named.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else backend.token_to_id(token))

    @cached_property
    def full(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        backend = self.backend_tokenizer
        setattr(backend, COPY, lambda memo: backend)  # transformers copies it through JSON, which takes a second
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **self._named)
        delattr(backend, COPY)
        fast.chat_template = self.chat_template
        return fast

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.full, name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.full(*texts, **options)

    def encode(self, text: str, **options: Any) -> list[int]:
        special = options.pop("add_special_tokens", True)
        options.pop("verbose", None)
        if options or not isinstance(text, str):
            return list(self.full.encode(text, add_special_tokens=special, **options))
        return list(self.backend_tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        if options.pop("clean_up_tokenization_spaces", False) or options or not isinstance(ids, list):
            return self.full.decode(ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        added = self.backend_tokenizer.get_added_tokens_decoder().items()
        return {token.content: index for index, token in sorted(added, key=lambda each: each[0])}

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()


def make_tokenizer(metadata: Mapping[str, Any], where: str) -> Any:
    """The tokenizer that a GGUF file's metadata describe, chat template included.

    Raises ModelError, which names the file by ``where``, for another kind of tokenizer, for an unknown pre-tokenizer,
    and for lists that contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama", LISTED_MERGES):
        raise ModelError(
            f"{where} has a tokenizer of kind {shown(model)}; only byte-level BPE ('gpt2') and SentencePiece's "
            f"('llama', '{LISTED_MERGES}') are read from GGUF files"
        )
    rules = _pre_tokenizer(metadata, where) if model == "gpt2" else None
    originals = _strings(metadata, "tokens", where)
    types = _token_types(metadata, originals, where)
    tokens = _unique(originals, types)
    ids = {name: special_id(metadata, name, len(tokens), where) for name in ("bos", "eos", "unknown")}
    padding = metadata.get("tokenizer.ggml.padding_token_id")
    valid = isinstance(padding, int) and 0 <= padding < len(tokens)
    ids["padding"] = padding if valid else None  # nothing is padded here, so any other does no harm
    if rules is None:
        tokenizer = _sentencepiece(metadata, tokens, types, ids["unknown"], where)
    else:
        tokenizer = _byte_level(metadata, rules, tokens, where)
    renamed = [decoders.Replace(name, text) for name, text in zip(tokens, originals) if name != text]
    if renamed:
        tokenizer.decoder = decoders.Sequence([*renamed, tokenizer.decoder])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False, **_strips(metadata, token))
            for token, kind in zip(tokens, types)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", rules is None or rules.add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    added: dict[str, tuple[str, int]] = {}
    for name in [name for name, add in (("bos", add_bos), ("eos", add_eos)) if add]:
        index = ids[name]
        if index is None:
            raise ModelError(f"{where} asks for {name.upper()} in every text, but does not say which token that is")
        added[name] = tokens[index], index
    if added:
        before, after = ([added[name][0]] if name in added else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=sorted(set(added.values()))
        )
    elif rules is not None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    options = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named: dict[str, Any] = {options[name]: tokens[index] for name, index in ids.items() if index is not None}
    longest = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(longest, int):
        named["model_max_length"] = longest
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{where} has a tokenizer.chat_template that is no text")
    result = GGUFTokenizer(tokenizer, named, template)
    # transformers adds special tokens that are not added ones: the backend changes with it
    made: Any = result if set(result.all_special_tokens) <= result.get_added_vocab().keys() else result.full
    found = {
        role: [index for key in keys if (index := special_id(metadata, key, len(tokens), where)) is not None]
        for role, keys in INFILL_KEYS.items()
    }
    made.infill_ids = {role: indices[0] for role, indices in found.items() if indices}
    return made


def vocabulary(metadata: Mapping[str, Any], where: str) -> dict[str, int]:
    """The ids of the tokenizer's tokens. Raises ModelError."""
    tokens = _strings(metadata, "tokens", where)
    return {token: index for index, token in enumerate(_unique(tokens, _token_types(metadata, tokens, where)))}


def _pre_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{where} names no pre-tokenizer that is known (tokenizer.ggml.pre is {shown(name)}); "
            f"there are: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _token_types(metadata: Mapping[str, Any], tokens: list[str], where: str) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{where} has {len(tokens)} tokens, but not as many entries in tokenizer.ggml.token_type")
    return [CONTROL if token in ENDS else kind for token, kind in zip(tokens, types)]


def _unique(tokens: list[str], types: list[int]) -> list[str]:
    """The tokens with unique names. Empty ones and duplicates get names that no text has. Of duplicates, one that is
    matched before the text is split keeps its name, or else the first."""
    if len({*tokens, ""}) > len(tokens):
        return tokens
    owners: dict[str, int] = {}
    for index in sorted(range(len(tokens)), key=lambda index: types[index] not in (CONTROL, USER_DEFINED)):
        owners.setdefault(tokens[index], index)
    return [token if token and owners[token] == index else f"\0twin {index}\0" for index, token in enumerate(tokens)]


def _strips(metadata: Mapping[str, Any], token: str) -> dict[str, bool]:
    """The sides on which added tokens strip white space, which files do not say: the right in Phi-3, both in Phi-4."""
    if metadata.get("general.architecture") != PHI3.gguf:
        return {}
    if metadata.get("tokenizer.ggml.model") == "llama":
        return {"rstrip": token not in PHI3_PLAIN}
    return dict.fromkeys(("lstrip", "rstrip"), metadata.get("tokenizer.ggml.pre") == "dbrx")


def _byte_level(metadata: Mapping[str, Any], rules: PreTokenizer, tokens: list[str], where: str) -> Tokenizer:
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, _listed_merges(metadata, ids, where), ignore_merges=rules.ignore_merges))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    byte_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], unknown: int | None, where: str
) -> Tokenizer:
    """Raises ModelError where a score, a merge or a byte's token is missing."""
    ids = {token: index for index, token in enumerate(tokens)}
    listed = metadata.get("tokenizer.ggml.model") == LISTED_MERGES
    merges = _listed_merges(metadata, ids, where) if listed else _scored_merges(metadata, tokens, types, where)
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in ids]
    if missing:
        raise ModelError(f"{where} has a tokenizer without a token for byte {missing[0]}")
    unk_token = tokens[unknown] if unknown is not None else None
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", not listed)
    spaces, words = normalizers.Replace(" ", SPACE), decoders.Replace(SPACE, " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([words, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _listed_merges(metadata: Mapping[str, Any], ids: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    """Pairs of tokens in the order in which they are merged. A token may begin with a space."""
    result = []
    for merge in _strings(metadata, "merges", where):
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"{where} merges {shown(merge)}, which is not in its vocabulary")
        result.append((left, right))
    return result


def _scored_merges(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], where: str
) -> list[tuple[str, str]]:
    """Every pair of tokens whose union is a token, those with the highest scores first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], (int, float)):
        raise ModelError(f"{where} has {len(tokens)} tokens, but not as many numbers in tokenizer.ggml.scores")
    mergeable = {
        token: score for token, score, kind in zip(tokens, scores, types) if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    result = []
    for token, score in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                result.append((score, (left, right)))
    return [pair for _, pair in sorted(result, key=lambda each: each[0], reverse=True)]


def _strings(metadata: Mapping[str, Any], name: str, where: str) -> list[str]:
    result = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(result, list) or not result or not isinstance(result[0], str):
        raise ModelError(f"{where} has no list of texts in tokenizer.ggml.{name}")
    return result
