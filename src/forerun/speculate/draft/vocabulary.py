"""Two vocabularies side by side: the bytes of every token, the tokens that both have, and text carried across."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from forerun.core.errors import ConfigError


def byte_alphabet() -> dict[str, int]:
    """The printable characters in which byte-level BPE spells bytes (GPT-2's table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in kept}
    others = [byte for byte in range(256) if byte not in set(kept)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class Vocabulary:
    """A tokenizer's tokens as bytes. Special tokens have none; they are known by their name."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        vocab = {token: i for token, i in tokenizer.get_vocab().items() if i < size}
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.names = {i: token for token, i in vocab.items() if token in special}
        plain = {i: token for token, i in vocab.items() if token not in special}
        byte_level = any("Ġ" in token for token in plain.values())
        self.word_marks = not byte_level and any("▁" in token for token in plain.values())
        alphabet = byte_alphabet() if byte_level else {}
        self.bytes = {i: self._bytes(token, alphabet) for i, token in plain.items()}

    def _bytes(self, token: str, alphabet: dict[str, int]) -> bytes:
        if alphabet and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        if self.word_marks:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            token = token.replace("▁", " ")
        return token.encode("utf-8", "surrogatepass")

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Bytes to id; of several tokens with the same bytes, the first."""
        result: dict[bytes, int] = {}
        for i in sorted(self.bytes):
            result.setdefault(self.bytes[i], i)
        return result

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a text."""
        return b"".join(self.bytes.get(token, b"") for token in tokens)

    def encode(self, text: str, *, whole: bool = False) -> list[int]:
        """Ids of a text; ``whole``: with the special tokens that begin one."""
        return self.tokenizer.encode(text, add_special_tokens=whole, verbose=False)


class Bridge:
    """From a target's vocabulary to a draft's and back.

    ``shared`` maps the target's ids to the draft's where both have a token: equal bytes, equal special names, and the
    tokens that end a text. Raises ConfigError where they share no text.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, target_eos: frozenset[int], draft_eos: frozenset[int]):
        self.target = target
        self.draft = draft
        self.shared = {i: draft.ids[text] for i, text in target.bytes.items() if text in draft.ids}
        if not self.shared:
            raise ConfigError("the draft's vocabulary shares no token with the target's: choose another draft")
        names = {name: i for i, name in draft.names.items()}
        self.shared.update({i: names[name] for i, name in target.names.items() if name in names})
        if target_eos and draft_eos and not any(self.shared.get(end) in draft_eos for end in target_eos):
            self.shared[min(target_eos)] = min(draft_eos)

    @cached_property
    def back(self) -> dict[int, int]:
        """The draft's ids to the target's, where both have a token."""
        return {draft: target for target, draft in self.shared.items()}


class Reading:
    """A target's text as the draft reads it. It only grows: what was read once stays as it was read."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.tokens: list[int] = []
        self.read = 0
        """How many of the target's tokens these are."""
        self.ends: list[int] = []
        """Per token of the target: how many of the draft's there are after it."""
        self._pending = b""

    def follow(self, tokens: Sequence[int]) -> None:
        """Read the target's tokens up to the last of ``tokens``: a text's beginning as a whole, so that the draft
        sees it as its own tokenizer would cut it, later tokens one by one."""
        if not self.read:
            self._begin(tokens)
        for token in tokens[self.read :]:
            self.extend(token)

    def _begin(self, tokens: Sequence[int]) -> None:
        whole = True
        for piece in self._pieces(tokens):
            if isinstance(piece, bytes):
                self.tokens += self.bridge.draft.encode(piece.decode("utf-8", "replace"), whole=whole)
            else:
                self.tokens.append(piece)
            whole = False
        self.read = len(tokens)
        self.ends = [0] * (len(tokens) - 1) + [len(self.tokens)] if tokens else []

    def _pieces(self, tokens: Sequence[int]) -> list[bytes | int]:
        """The target's tokens as runs of text and, between them, the draft's ids of special tokens that it has too."""
        pieces: list[bytes | int] = []
        text = b""
        for token in tokens:
            if token in self.bridge.target.bytes:
                text += self.bridge.target.bytes[token]
                continue
            pieces += [text] if text else []
            pieces += [self.bridge.shared[token]] if token in self.bridge.shared else []
            text = b""
        return [*pieces, text] if text else pieces

    def extend(self, token: int) -> None:
        """Read one more token: as the same token if the draft has it, else spelled out with the draft's. Bytes that
        do not make a character yet wait for the next token; if that is shared they are left out."""
        own = self.bridge.shared.get(token)
        if own is not None:
            self.tokens.append(own)
            self._pending = b""
        else:
            self._spell(self.bridge.target.bytes.get(token, b""))
        self.read += 1
        self.ends.append(len(self.tokens))

    def adopt(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        """Read the target's ``tokens``, whose text may begin like the draft's own ``drafted`` tokens: those that agree
        are kept as they are. Returns how many."""
        pieces = self._pieces(tokens)
        kept = 0
        for own in drafted if not self._pending else ():
            text = self.bridge.draft.bytes.get(own)
            first = pieces[0] if pieces else None
            if isinstance(first, bytes) and text and first.startswith(text):
                pieces[0:1] = [first[len(text) :]] if first != text else []
            elif first == own and text is None:
                del pieces[0]
            else:
                break
            self.tokens.append(own)
            kept += 1
        for piece in pieces:
            if isinstance(piece, bytes):
                self._spell(piece)
            else:
                self.tokens.append(piece)
                self._pending = b""
        self.read += len(tokens)
        self.ends += [0] * (len(tokens) - 1) + [len(self.tokens)] if tokens else []
        return kept

    def _spell(self, piece: bytes) -> None:
        self._pending += piece
        try:
            text = self._pending.decode("utf-8")
        except UnicodeDecodeError:
            return
        self._pending = b""
        if text:
            self.tokens += self.bridge.draft.encode(text)

    def covered(self, length: int) -> int:
        """How many of the target's tokens the draft's first ``length`` tokens surely hold."""
        known = 0
        for count, end in enumerate(self.ends, start=1):
            if 0 < end <= length:
                known = count
        return known
