"""Where an answer ends, with every way of handing it its tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import SamplingParams
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.engine.stop import Finish, Stopper, held_back
from forerun.models.text.tokenizer import Detokenizer


class Letters:
    """A tokenizer whose tokens are letters, but for 0, which ends texts, and 99, which is 'xyz'."""

    def decode(self, tokens, **options):
        return "".join("xyz" if token == 99 else chr(96 + token) for token in tokens if token)


def ids(text):
    return [ord(letter) - 96 for letter in text]


def answer(blocks, limit=1000, **options):
    """Feed blocks as rounds do: all but a block's last token were drafted and accepted."""
    params = SamplingParams(max_tokens=limit, **options)
    sequence = RequestState(0, [1, 2], 2, params, 0, frozenset([0]), max_tokens=2 + limit)
    stopper = Stopper(sequence, Detokenizer(Letters(), [1, 2]))
    for block in blocks:
        draft = Draft.chain(block[:-1])
        verdict = Verdict(path=list(range(len(block) - 1)), token=block[-1])
        verdict.tokens = stopper.clip(draft, verdict)
        sequence.tokens.extend(verdict.tokens)
        assert verdict.tokens == block[: len(verdict.tokens)]
        assert verdict.accepted == min(len(verdict.tokens), len(block) - 1)
        if stopper.finish is not None:
            break
        assert verdict.tokens == block
    finish = stopper.finish
    text = stopper.detokenizer.text
    return sequence.tokens[2:], text if finish is None or finish.cut is None else text[: finish.cut], finish


def blocks_of(tokens, sizes):
    blocks, start, turn = [], 0, 0
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        blocks.append(tokens[start : start + size])
        start, turn = start + size, turn + 1
    return blocks


CASES = [
    ("hello world".replace(" ", "z"), {"stop": "zw"}, "hellozw", "hello", "zw"),
    ("hellozworld", {"stop": "zw", "include_stop_str_in_output": True}, "hellozw", "hellozw", "zw"),
    ("hellozworld", {"stop": ["rl", "or", "world"]}, "hellozwor", "hellozw", "or"),
    ("hellozworld", {"stop": ["h"]}, "h", "", "h"),
    ("hellozworld", {"stop": ["h"], "min_tokens": 2}, "hellozworld", "hellozworld", None),
    ("hellozworld", {"stop": ["l"], "min_tokens": 4}, "hell", "hel", "l"),
    ("hellozworld", {"stop": ["ello"], "min_tokens": 6}, "hellozworld", "hellozworld", None),
    ("hellozworld", {"stop": ["zz"]}, "hellozworld", "hellozworld", None),
    ("aaab", {"stop": ["aab"]}, "aaab", "a", "aab"),
]


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [11]])
@pytest.mark.parametrize(("tokens", "options", "kept", "text", "by"), CASES)
def test_stop_strings(tokens, options, kept, text, by, sizes):
    got, said, finish = answer(blocks_of(ids(tokens), sizes), **options)
    assert (got, said) == (ids(kept), text)
    assert (finish.stopped_by if finish else None) == by
    assert finish is None or finish.reason == "stop"


def test_the_earliest_of_several_in_one_token():
    got, text, finish = answer([ids("ab"), [3, 99, 4]], stop=["z", "y", "cxyz"])
    assert got == [*ids("abc"), 99]
    assert (text, finish.stopped_by) == ("ab", "cxyz")


@pytest.mark.parametrize("sizes", [[1], [2], [5]])
def test_token_ids_that_stop(sizes):
    for options, kept, text, by in [
        ({"stop_token_ids": [3]}, "abc", "ab", 3),
        ({"stop_token_ids": [3], "include_stop_str_in_output": True}, "abc", "abc", 3),
        ({"stop_token_ids": [1, 4], "min_tokens": 2}, "abcd", "abc", 4),
        ({"stop_token_ids": [9]}, "abcde", "abcde", None),
    ]:
        got, said, finish = answer(blocks_of(ids("abcde"), sizes), **options)
        assert (got, said, finish.stopped_by if finish else None) == (ids(kept), text, by)


@pytest.mark.parametrize("sizes", [[1], [2], [5]])
def test_the_end_of_the_text(sizes):
    blocks = blocks_of([1, 2, 0, 3, 4], sizes)
    assert answer(blocks) == ([1, 2, 0], "ab", Finish("stop", silent=True))
    assert answer(blocks, ignore_eos=True) == ([1, 2, 0, 3, 4], "abcd", None)
    assert answer(blocks, min_tokens=4) == ([1, 2, 0, 3, 4], "abcd", None)
    assert answer(blocks, stop_token_ids=[0])[2] == Finish("stop", 0, silent=True)


@pytest.mark.parametrize("sizes", [[1], [2], [5]])
def test_the_length_limit(sizes):
    for limit in range(1, 5):
        got, text, finish = answer(blocks_of(ids("abcde"), sizes), limit=limit)
        assert (got, text, finish) == (ids("abcde")[:limit], "abcde"[:limit], Finish("length"))
    assert answer(blocks_of(ids("abcde"), sizes), limit=5)[2] == Finish("length")
    assert answer(blocks_of([1, 2, 0], sizes), limit=3)[2] == Finish("stop", silent=True)


@pytest.mark.parametrize(("path", "stops", "kept", "finish"), [
    ([], [], [], Finish("error", "broken")),
    ([0, 1], [], [3, 5], Finish("error", "broken")),
    ([0, 1], [5], [3, 5], Finish("stop", 5, silent=True)),
    ([0, 1], [3], [3], Finish("stop", 3, silent=True)),
])  # fmt: skip
def test_an_error_ends_what_nothing_before_it_has_ended(path, stops, kept, finish):
    """The row behind the path has no token to give: 4 is none."""
    sequence = RequestState(0, [1, 2], 2, SamplingParams(stop_token_ids=stops), 0)
    stopper, verdict = Stopper(sequence, None), Verdict(path=path, token=4, error="broken")
    verdict.tokens = stopper.clip(Draft.chain([3, 5]), verdict)
    assert (verdict.tokens, verdict.accepted) == (kept, len(kept))
    assert stopper.finish == finish


@settings(max_examples=100, deadline=None)
@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_any_text_and_stops(text, stops, least, sizes):
    """Against the definition: the first token that completes a stop string, from ``min_tokens`` on, is the last."""
    ends = [n for n in range(max(1, least), len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    got, said, finish = answer(blocks_of(ids(text), sizes), stop=stops, min_tokens=least)
    if not ends:
        assert (got, said, finish) == (ids(text), text, None)
        return
    kept = text[: ends[0]]
    longest = max((stop for stop in stops if kept.endswith(stop)), key=len)
    assert got == ids(kept)
    assert said == kept[: len(kept) - len(longest)]
    assert finish == Finish("stop", longest, len(said))


def test_what_may_still_become_a_stop_string_is_held_back():
    params = SamplingParams(stop=["zw", "world"])
    for text, held in [("", 0), ("hello", 0), ("helloz", 1), ("hellow", 1), ("hellowor", 3), ("zworl", 4), ("zz", 1)]:
        assert held_back(text, params) == held


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens, **options):
        return "".join(map(chr, tokens))


def block_of(text, least):
    """The definition, line by line: what comes before the first line with text that is indented less, after another
    line with text; blank lines before it go, too."""
    kept = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if line.strip() and "".join(kept).strip() and indent + (line.lstrip()[0] in ")]}") < least:
            while not kept[-1].strip():
                kept.pop()
            return "\n".join(kept)
        kept.append(line)
    return None


def stopped(text, size, **options):
    """The text of an answer, what its reader saw of it piece by piece, and its finish."""
    params = SamplingParams(max_tokens=1000, **options)
    sequence = RequestState(0, [97], 1, params, 0, max_tokens=1001)
    stopper, shown = Stopper(sequence, Detokenizer(Characters(), [97])), [""]
    for block in blocks_of([*map(ord, text)], [size]):
        verdict = Verdict(path=list(range(len(block) - 1)), token=block[-1])
        sequence.tokens.extend(stopper.clip(Draft.chain(block[:-1]), verdict))
        whole, finish = stopper.detokenizer.text, stopper.finish
        if finish is not None:
            return whole[: finish.cut], shown, finish
        shown.append(whole[: len(whole) - held_back(whole, params)])
    return whole, shown, None


BLOCKS = [
    ("x = 1\n    y = 2\n\n\nz = 3\n", 4, "x = 1\n    y = 2"),
    ("f(\n        a,\n    )\n    return\n", 5, "f(\n        a,\n    )"),
    ("\n\ndef f():\n    pass\n\ndef g", 1, "\n\ndef f():\n    pass"),
    ("a\n\t\tb\n\tc", 2, "a\n\t\tb"),
    ("a\n    b\n   ", 4, None),
    ("a\n   b", 4, "a"),
]


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize(("text", "least", "block"), BLOCKS)
def test_a_block_ends_where_lines_are_indented_less(text, least, block, size):
    kept, _, finish = stopped(text, size, min_indent=least)
    assert kept == (text if block is None else block)
    assert (finish and finish.reason, finish and finish.stopped_by) == (None if block is None else "stop", None)


@settings(max_examples=200, deadline=None)
@given(st.text("ab \n)", min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["", "ab"]))
def test_any_text_and_indentation(text, least, size, stop):
    """The first character that decides where the block ends, or completes the stop string, is the last."""
    kept, shown, finish = stopped(text, size, min_indent=least, stop=stop or None)
    for end in range(1, len(text) + 1):
        block = block_of(text[:end], least)
        if block is not None or (stop and text[:end].endswith(stop)):
            assert (kept, finish.reason) == (text[: end - len(stop)] if block is None else block, "stop")
            break
    else:
        assert (kept, finish) == (text, None)
    for seen in shown:  # nothing was shown that the answer does not have
        assert kept.startswith(seen)
