"""SentencePiece's BPE out of GGUF files: every token has a score, and of all pairs the one whose union scores highest
is merged first; Gemma 4's files list the pairs instead, in the order in which they are merged. Spaces are written
U+2581, and what no token spells is spelled in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from forerun.core.errors import ModelError

SPACE = "\u2581"
MERGED = "gemma4"
"""What ``tokenizer.ggml.model`` calls the kind with a list of pairs."""
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Kinds in ``tokenizer.ggml.token_type``."""


def make_model(
    metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], unknown: int | None, where: str
) -> Tokenizer:
    """Raises ModelError, in which ``where`` names the file, where a score, a pair or a byte's token is missing."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    listed = metadata.get("tokenizer.ggml.model") == MERGED
    merges = _listed(metadata, vocabulary, where) if listed else _by_score(metadata, tokens, kinds, where)
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        raise ModelError(f"{where} has a tokenizer without a token for byte {missing[0]}")
    named = tokens[unknown] if unknown is not None else None
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=named, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", not listed)
    spaces, words = normalizers.Replace(" ", SPACE), decoders.Replace(SPACE, " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    bare = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([words, decoders.ByteFallback(), decoders.Fuse(), *bare])
    return tokenizer


def _listed(metadata: Mapping[str, Any], vocabulary: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    result = []
    merges = metadata.get("tokenizer.ggml.merges")
    for merge in merges if isinstance(merges, list) else ():
        left, _, right = merge[1:].partition(" ") if isinstance(merge, str) else ("", "", "")
        pair = (merge[:1] + left, right) if right else None
        if pair is None or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ModelError(f"{where} has {merge!r} in tokenizer.ggml.merges, which is no pair of its tokens")
        result.append(pair)
    if not result:
        raise ModelError(f"{where} has no list of pairs in tokenizer.ggml.merges")
    return result


def _by_score(
    metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], where: str
) -> list[tuple[str, str]]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], (int, float)):
        raise ModelError(f"{where} has {len(tokens)} tokens, but not as many numbers in tokenizer.ggml.scores")
    mergeable = {
        token: index for index, (token, kind) in enumerate(zip(tokens, kinds)) if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    return [pair for _, pair in sorted(_merges(mergeable, scores), key=lambda result: result[0], reverse=True)]


def _merges(tokens: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[float, tuple[str, str]]]:
    for token, index in tokens.items():
        score = scores[index]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in tokens and right in tokens:
                yield score, (left, right)
