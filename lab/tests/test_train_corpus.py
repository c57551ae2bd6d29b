"""Corpus and tokenizer: the split, the sequences, lossless encoding, bad input."""

import pytest
import torch

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError
from forerun.measure.prompts import held_out_files, standard_library
from forerun_lab.train.corpus import TokenStream, encode_files, list_files, read_text, split_files
from forerun_lab.train.folder import END_OF_TEXT, train_tokenizer

TEXT = "def add(left, right):\n        return left + right  # é ∑ 語 \t\r\n\n\n"


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        (tmp_path / f"file{number}.py").write_text(TEXT + f"value = {number}\n", encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("assert True\n")
    (tmp_path / "image.bin").write_bytes(b"\xff\x00")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 3, vocab_size=280, max_length=64)


def test_test_folders_and_other_kinds_of_files_are_left_out(folder):
    assert [path.name for path in list_files(folder)] == [f"file{number}.py" for number in range(10)]
    assert list_files(folder / "file3.py") == [folder / "file3.py"]


def test_the_split_is_disjoint_complete_and_a_function_of_the_seed(folder):
    files = list_files(folder)
    train, held_out = split_files(files, 3, seed=5)
    assert len(held_out) == 3
    assert sorted(train + held_out) == files
    assert split_files(files, 3, seed=5) == (train, held_out)
    assert any(split_files(files, 3, seed=seed)[1] != held_out for seed in range(5))


@pytest.mark.parametrize("count", [0, 10, 11])
def test_a_split_that_leaves_a_side_empty_is_an_error(folder, count):
    with pytest.raises(ConfigError, match="held_out must be between 1 and 9"):
        split_files(list_files(folder), count, seed=0)


def test_a_missing_or_empty_corpus_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        list_files(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no"):
        list_files(tmp_path)


def test_encoding_gives_any_text_back(tokenizer):
    for text in (TEXT, "  leading, trailing  ", "\x00\x7f‎ 🙂 unseen", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 280
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.encode(TEXT + END_OF_TEXT)[-1] == tokenizer.eos_token_id


def test_a_stream_holds_every_file_once_with_separators(folder, tokenizer):
    files = list_files(folder)
    stream = encode_files(files, tokenizer, seed=1)
    texts = tokenizer.decode(stream.tolist()).split(END_OF_TEXT)
    assert sorted(texts) == sorted(["", *(read_text(path) for path in files)])
    assert torch.equal(stream, encode_files(files, tokenizer, seed=1))
    assert stream[-1] == tokenizer.eos_token_id


def test_an_epoch_shows_every_window_once_and_the_next_one_others():
    stream = TokenStream(torch.arange(101, dtype=torch.int32), seed=0)
    epoch = stream.batch(0, 9, 10)
    assert epoch.shape == (9, 11)
    assert (epoch.diff(dim=1) == 1).all()
    starts = epoch[:, 0].sort().values
    assert (starts.diff() == 10).all()
    assert not torch.equal(epoch, stream.batch(90, 9, 10))


def test_batches_depend_on_the_tokens_consumed_only():
    stream = TokenStream(torch.arange(500, dtype=torch.int32), seed=7)
    together = stream.batch(40, 6, 10)
    assert torch.equal(together[2:], stream.batch(60, 4, 10))


def test_a_corpus_that_is_too_short_is_an_error():
    with pytest.raises(ConfigError, match="too few for sequences of 10"):
        TokenStream(torch.arange(12), seed=0).batch(0, 1, 10)


def test_bundled_models_are_found_by_name():
    for name in pretrained.folders():
        assert (pretrained.path(name) / "config.json").is_file()
    with pytest.raises(ModelError, match="no bundled model is called 'nothing'; there are: "):
        pretrained.path("nothing")
    with pytest.raises(ModelError):
        pretrained.path("../train")


def test_the_bundled_target_s_held_out_files_are_in_the_standard_library():
    files = held_out_files()
    assert len(files) > 10
    assert set(files) <= set(list_files(standard_library()))
