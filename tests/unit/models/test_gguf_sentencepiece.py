"""SentencePiece tokenizers out of GGUF files, against its rule carried out naively."""

import random
from itertools import pairwise

import pytest

from forerun.core.errors import ModelError
from forerun.models.text.gguf_tokenizer import make_tokenizer
from refusals import refused

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
OWN = ["\n\n", "  ", "<tool>"]
"""User-defined: they cut the text before anything is merged."""
PIECES = [
    "▁t", "he", "▁the", "in", "▁a", "er", "▁in", "th", "ing", "▁th", "ere", "▁there", "re", "aa", "aaa", "▁▁", "ti",
    "on", "tion", "▁ti", "ation", "ß", "ẞ", "е", "не", "<0", "<0x", "<0x4", "1>",
]  # fmt: skip
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz.н<041>"]
TOKENS = [*SPECIAL, *OWN, *BYTES, *PIECES, *LETTERS]
COUNTS = ((4, 3), (len(OWN), 4), (256, 6), (len(PIECES) + len(LETTERS), 1))
KEYS = {
    "model": "llama", "pre": "default", "tokens": TOKENS,
    "token_type": [kind for count, kind in COUNTS for _ in range(count)],
    "scores": [-1000.0] * 7 + [0.0] * 256 + [-float(place) for place in range(len(PIECES) + len(LETTERS))],
    "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0, "add_space_prefix": False,
}  # fmt: skip


def tokenizer(**changes):
    return make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in {**KEYS, **changes}.items()}, "file")


def naive(text):
    """Of all neighbours the pair whose union scores highest, leftmost first, until there is none; the rest in bytes."""
    scores = dict(zip(TOKENS, KEYS["scores"]))
    known = {token for token, kind in zip(TOKENS, KEYS["token_type"]) if kind == 1}
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not unions:
            return [piece for part in parts for piece in ([part] if part in known else spelled(part))]
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def spelled(part):
    return [f"<0x{byte:02X}>" for byte in part.encode()]


def test_pairs_are_merged_by_score():
    ours, noise = tokenizer(), random.Random(0)
    for _ in range(300):
        words = ["".join(noise.choices("theinaonr", k=noise.randint(1, 7))) for _ in range(4)]
        text = " ".join([*words, noise.choice(["there", "station", "нещо", "ẞß", "日本", "Ab."])])
        assert ours.tokenize(text) == naive(text), text
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text
    assert ours.tokenize("<0x41>") == naive("<0x41>") == ["<0x4", "1>"]  # no text is a byte's token


def test_what_the_user_defined_cuts_the_text():
    ours = tokenizer()
    assert ours.tokenize("a  the\n\nin<tool>re") == ["a", "  ", "t", "he", "\n\n", "in", "<tool>", "re"]
    assert ours.decode(ours.encode("a  the\n\nin<tool>"), skip_special_tokens=True) == "a  the\n\nin<tool>"
    assert ours.encode("<eos>", add_special_tokens=False) == [1]


def test_texts_begin_as_the_file_says():
    assert tokenizer().encode("a") == [2, TOKENS.index("a")]
    assert tokenizer(add_bos_token=False).encode("a") == [TOKENS.index("a")]
    assert tokenizer(add_eos_token=True).encode("a")[-1] == 1
    before = tokenizer(add_space_prefix=True)
    assert before.tokenize("the a") == ["▁the", "▁a"]
    assert before.decode(before.encode("the a"), skip_special_tokens=True) == "the a"


def test_phi_3s_added_tokens_take_the_spaces_behind_them():
    """As its tokenizer.json has them, all but three."""
    added = ["<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>"]
    changes = {
        "tokens": [*TOKENS, *added], "token_type": [*KEYS["token_type"], *[3] * 4],
        "scores": [*KEYS["scores"], *[0.0] * 4], "add_space_prefix": True, "add_bos_token": False,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{key}": value for key, value in {**KEYS, **changes}.items()}
    text = "<|user|>\nthe<|end|>\n <|assistant|>\n"
    phi3, other = (make_tokenizer(keys | {"general.architecture": name}, "file") for name in ("phi3", "llama"))

    def tokens(tokenizer, text):
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    assert tokens(phi3, text) == ["<|user|>", "▁the", "<|end|>", "<|assistant|>"]
    assert tokens(phi3, "<|endoftext|>\nthe")[:3] == ["<|endoftext|>", "▁", "<0x0A>"]
    assert tokens(other, text)[:3] == ["<|user|>", "▁", "<0x0A>"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "not as many numbers in tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "not as many numbers in tokenizer.ggml.scores"),
        ({"scores": ["x"] * len(TOKENS)}, "not as many numbers in tokenizer.ggml.scores"),
        ({"tokens": ["a byte" if token == "<0x41>" else token for token in TOKENS]}, "without a token for byte 65"),
        ({"bos_token_id": None}, "asks for BOS in every text"),
        ({"model": "gemma4", "merges": ["q z"]}, "merges 'q z', which is not in its vocabulary"),
        ({"model": "gemma4"}, r"has no list of texts in tokenizer\.ggml\.merges"),
    ],
)
def test_what_is_missing_is_named(changes, message):
    refused(ModelError, message, tokenizer, **changes)


def test_pairs_that_are_listed_are_merged_in_their_order():
    """As Gemma 4's files have them."""
    merges = ["i n", "t h", "e r", "h e", "r e"]
    ours = tokenizer(model="gemma4", merges=merges, scores=None, add_space_prefix=None)
    assert ours.tokenize("the here") == ["th", "e", "▁", "h", "er", "e"]
