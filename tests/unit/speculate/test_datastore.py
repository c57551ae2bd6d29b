"""Texts to retrieve drafts from: against brute force, from files, and in an engine."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from drafting import Letters, build, noisy_text, occurrences, sequence
from forerun import LLM, ConfigError, SamplingParams
from forerun.engine import tuned
from forerun.speculate.draft import datastore
from forerun.speculate.draft.datastore import Datastore
from refusals import refused

LETTERS = Letters()


def texts_of(seed):
    draw = random.Random(seed)
    return [noisy_text(draw, draw.randrange(40), letters=3) for _ in range(draw.randrange(1, 5))]


def followers(part, texts):
    """What comes behind ``part``; None: a text's end."""
    result = Counter()
    for text in texts:
        result.update(text[end] if end < len(text) else None for end in occurrences(part, text))
    return result


def check(result, state, part, texts, depth):
    """What is said to follow ``part``, and what follows that."""
    expected = followers(part, texts)
    total = expected.total()
    rest = 1 if state is result.state else 0  # the text's own end counts as an occurrence, too
    assert len(state) == total
    told = list(result.continuations(state))
    assert [round(math.exp(log_q) * (total + rest)) for _, log_q, _ in told] == [
        expected[token] for token, _, _ in told
    ]
    assert {token for token, _, _ in told} == set(expected) - {None}
    assert [log_q for _, log_q, _ in told] == sorted((log_q for _, log_q, _ in told), reverse=True)
    if depth:
        for token, _, after in told:
            check(result, after, [*part, token], texts, depth - 1)


@pytest.mark.parametrize("seed", range(8))
def test_matches_and_what_follows_them(seed):
    texts, draw = texts_of(seed), random.Random(100 + seed)
    store = Datastore(texts)
    for _ in range(20):
        text = noisy_text(draw, draw.randrange(5, 30), letters=4)
        reach = draw.choice([2, 5, 24])
        result = store.match(text, reach)
        longest = max((n for n in range(1, reach + 1) if n <= len(text) and followers(text[-n:], texts)), default=0)
        assert result.length == longest
        while result.length:
            part = text[-result.length :]
            check(result, result.state, part, texts, 2)
            more = [n for n in range(1, result.length) if followers(text[-n:], texts) > followers(part, texts)]
            result = result.shorter()
            assert result.length == max(more, default=0)


def test_a_match_is_no_longer_than_what_is_sorted():
    text = [1, 2] * 40
    result = Datastore([text]).match(text, 100)
    assert result.length == datastore.REACH
    assert result.last - result.first == 25
    (told,) = result.continuations(result.state)
    assert told[0] == 1
    assert math.exp(told[1]) == pytest.approx(24 / 26)


def test_of_many_occurrences_some_are_counted(monkeypatch):
    monkeypatch.setattr(datastore, "MAX_OCCURRENCES", 4)
    store = Datastore([[7, token] for token in range(10, 20) for _ in range(10)])
    result = store.match([3, 7], 24)
    told = list(result.continuations(result.state))
    assert result.length == 1
    assert len(told) == 4
    for token, log_q, after in told:
        assert math.exp(log_q) == pytest.approx(100 / 101 / 4)
        assert [store.tokens[index - 1] for index in after] == [token + 1]


@pytest.mark.parametrize("texts", [[[5]], [[70_000, 3], [], [3]]])
def test_files_keep_texts(texts, tmp_path):
    datastore.save(tmp_path / "texts.safetensors", texts)
    result = Datastore.load(tmp_path / "texts.safetensors", 70_001, None).match([3], 24)
    assert followers([3], texts).total() == result.last - result.first


def test_files_that_are_none(tmp_path):
    path = tmp_path / "texts.safetensors"
    refused(ConfigError, "cannot read the datastore", Datastore.load, path, 10, None)
    path.write_bytes(b"text")
    refused(ConfigError, "cannot read the datastore", Datastore.load, path, 10, None)
    tokens, lengths = np.array([1, 2, 3], np.int32), np.array([3], np.int32)
    save_file({"tokens": tokens, "lengths": lengths}, path)
    refused(ConfigError, "is not a datastore", Datastore.load, path, 10, None)
    about = {"format": datastore.FORMAT}
    save_file({"tokens": tokens}, path, metadata=about)
    refused(ConfigError, "cannot read the datastore", Datastore.load, path, 10, None)
    for wrong in ([2], [4, -1], [2**63 - 1, 2**63 - 1, 5]):
        save_file({"tokens": tokens, "lengths": np.array(wrong)}, path, metadata=about)
        refused(ConfigError, "is damaged", Datastore.load, path, 10, None)
    for wrong in (tokens.astype(np.float32), tokens[None]):
        save_file({"tokens": wrong, "lengths": lengths}, path, metadata=about)
        refused(ConfigError, "no lists of whole numbers", Datastore.load, path, 10, None)
    strange = {"tokens": torch.ones(3, dtype=torch.bfloat16), "lengths": torch.tensor([3])}
    save_torch(strange, path, metadata=about)
    refused(ConfigError, "cannot read the datastore", Datastore.load, path, 10, None)
    save_file({"tokens": tokens, "lengths": lengths}, path, metadata=about)
    refused(ConfigError, "not among the model's 3", Datastore.load, path, 3, None)
    for nothing in ([], [[]], [[], []]):
        datastore.save(path, nothing)
        refused(ConfigError, "no text to look anything up in", Datastore.load, path, 10, None)


@pytest.mark.parametrize("tree", [{}, {"tree": [2, 1, 1]}])
def test_a_known_answer_is_drafted(tiny_target, tmp_path, tree):
    prompt, other = [5, 6, 7, 8], [30, 31]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True) for temperature in (0.0, 0.9)
    ]
    plain = [out.outputs[0].token_ids for out in LLM(tiny_target).generate([prompt, other], params)]
    datastore.save(tmp_path / "texts.safetensors", [[*prompt, *plain[0]]])
    config = {"method": "suffix", "datastore": str(tmp_path / "texts.safetensors"), "num_speculative_tokens": 3, **tree}
    result = LLM(tiny_target, speculative_config=config).generate([prompt, other], params)
    assert [out.outputs[0].token_ids for out in result] == plain
    assert result[0].metrics.tokens_per_round > 3.5


def test_a_file_of_text_is_read_in_the_models_tokens(tmp_path):
    (tmp_path / "song.txt").write_text("row row row your boat")
    drafter = build("suffix", datastore=str(tmp_path / "song.txt"), num_speculative_tokens=5)
    (draft,) = drafter.propose([sequence(LETTERS.encode("a row row your"))], [5])
    assert draft.tokens == LETTERS.encode("boat")
    (tmp_path / "song.txt").write_bytes(b"\xff\xfe\x00")
    for path in (str(tmp_path / "song.txt"), str(tmp_path / "none.txt"), "~no-such-user/x.txt", "a\0b"):
        refused(ConfigError, "cannot read the datastore", build, "suffix", datastore=path)
    (tmp_path / "song.txt").write_text("row")
    refused(ConfigError, "not among the model's 20", Datastore.load, tmp_path / "song.txt", 20, LETTERS)
    refused(ConfigError, "there is no tokenizer", Datastore.load, tmp_path / "song.txt", 20, None)
    refused(ConfigError, "datastore must be text, not 5", build, "suffix", datastore=5)


def test_a_tuned_folder_places_it(tiny_target, tmp_path):
    datastore.save(tmp_path / "text.safetensors", [[1, 2, 3]])
    config = {"method": "cascade", "drafters": [{"method": "suffix", "datastore": "text.safetensors"}]}
    tuned.save(tmp_path, tiny_target, config, ["text.safetensors"])
    (drafter,) = tuned.load(tmp_path, tiny_target)["drafters"]
    assert drafter["datastore"] == str(tmp_path / "text.safetensors")
    content = json.loads((tmp_path / tuned.FILE).read_text("utf-8"))
    assert content["speculative_config"] == config
    datastore.save(tmp_path / "text.safetensors", [[1, 2, 4]])
    refused(ConfigError, "has changed since", tuned.load, tmp_path, tiny_target)
