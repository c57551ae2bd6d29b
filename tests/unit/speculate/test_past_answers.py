"""``memory``: answers that outlive the process, for ``suffix``. Its file is private; others are refused in one line."""

import json
import os
import random
import textwrap

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.speculate.draft import memory as kept
from forerun.speculate.draft.memory import Memory
from refusals import refused

MODEL, VOCAB, SIZE = "0123456789abcdef", 1000, 1 << 20
PROMPTS = [[5, 6, 7, 8], [30, 31]]
PARAMS = [SamplingParams(temperature=each, max_tokens=40, seed=3, ignore_eos=True) for each in (0.0, 0.9)]


def opened(path, size=SIZE, model=MODEL):
    return Memory(str(path), model, VOCAB, size)


def answer(number, length=10):
    return [number, *range(100, 99 + length)]


def firsts(path):
    """The first token of each answer in the file, in order."""
    tensors = load_file(path)
    ends = np.cumsum(tensors["lengths"])
    return [int(tensors["tokens"][end - length]) for end, length in zip(ends, tensors["lengths"])]


def written(path, *numbers):
    memory = opened(path)
    for number in numbers:
        memory.add(answer(number))
    memory.save()
    return path


def generate(target, **options):
    with LLM(target, **options) as llm:
        return llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "suffix"},
        {"method": "suffix", "length": "adaptive"},
        {"method": "suffix", "tree": [2, 1, 1]},
        {"method": "cascade", "drafters": [{"method": "suffix"}, {"method": "random"}]},
        {"method": "staged", "drafter": {"method": "suffix"}},
        {"method": "suffix", "accept": "token"},
    ],
    ids=["chain", "adaptive", "tree", "cascade", "staged", "token"],
)
def test_another_process_gives_the_same_tokens_in_fewer_rounds(tiny_target, tmp_path, config):
    path = tmp_path / "answers"
    if config["method"] == "staged":
        config = {**config, "model": tiny_target}
    alone = generate(tiny_target, speculative_config=config)
    first = generate(tiny_target, speculative_config=config, memory=str(path))
    second = generate(tiny_target, speculative_config=config, memory=str(path))
    if config.get("accept") != "token":
        plain = generate(tiny_target, speculative_config=None)
        for result in (alone, first, second):
            assert [out.outputs[0].token_ids for out in result] == [out.outputs[0].token_ids for out in plain]
    if config["method"] != "staged" and "length" not in config:
        assert second[0].metrics.tokens_per_round > 1.3 * alone[0].metrics.tokens_per_round
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("end", ["", "del llm", "llm.close()", "llm.close(); llm = None", "raise SystemExit(3)"])
def test_it_is_saved_however_the_process_ends(warm, tiny_target, tmp_path, end):
    path = tmp_path / "answers"
    code = f"""
        from forerun import LLM, SamplingParams
        llm = LLM({tiny_target!r}, speculative_config={{"method": "suffix"}}, memory={str(path)!r})
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        print(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
        {end}
    """
    result = warm.run(code=textwrap.dedent(code))
    assert result.returncode == (3 if "raise" in end else 0), result.stderr
    assert load_file(path)["tokens"].tolist() == json.loads(result.stdout)


def test_it_is_saved_from_time_to_time(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "EVERY", 0.0)
    path = tmp_path / "answers"
    llm = LLM(tiny_target, speculative_config={"method": "suffix"}, memory=str(path))
    llm.generate(PROMPTS, PARAMS)
    assert load_file(path)["lengths"].tolist() == [40, 40]
    llm.close()


def test_commands(forerun, tiny_target, tmp_path):
    path = tmp_path / "answers"
    given = ("generate", "the cat sat on the mat; the cat", "--model", tiny_target, "--max-tokens", "24", "--json")
    remembering = ("--memory", str(path))
    results = [
        json.loads(forerun(*given, "--spec-method", "suffix", *more)[1]) for more in ((), remembering, remembering)
    ]
    assert results[0]["token_ids"] == results[1]["token_ids"] == results[2]["token_ids"]
    assert results[2]["metrics"]["rounds"] < results[0]["metrics"]["rounds"]
    for command in ("chat", "run", "serve", "generate", "batch"):
        assert "--memory-size" in forerun(command, "--help")[1]
    for command in ("bench", "plan", "check"):
        assert "--memory" not in forerun(command, "--help")[1].replace("--kv-cache-memory", "")
    for more, message in (
        (("--spec-method", "ngram"), "memory needs a drafter that looks up in it: choose method suffix"),
        (("--spec-method", "none"), "memory needs a drafter that looks up in it: choose method suffix"),
        (("--spec-method", "suffix", "--memory-size", "much"), "memory_size must be bytes"),
    ):
        code, out, err = forerun(*given, *more, "--memory", str(path))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err


def test_answers_are_in_the_order_of_their_last_use_and_the_oldest_go_first(tmp_path):
    path = written(tmp_path / "answers", 1, 2, 3, 1)
    assert firsts(path) == [2, 3, 1]
    written(path, 2, 4)
    assert firsts(path) == [3, 1, 2, 4]
    memory = opened(path, size=3 * 40)
    memory.add(answer(5))
    memory.save()
    assert firsts(path) == [2, 4, 5]
    memory.add(list(range(500)))
    memory.add([1, 2, 3])
    memory.save()
    assert load_file(path)["tokens"].tolist() == list(range(470, 500))


def test_processes_that_share_a_file_lose_nothing(warm, tmp_path):
    path = tmp_path / "answers"
    code = f"""
        import sys
        from forerun.speculate.draft.memory import Memory
        first = int(sys.argv[1])
        memory = Memory({str(path)!r}, {MODEL!r}, {VOCAB}, {SIZE})
        for number in range(first, first + 40):
            memory.add([number, *range(100, 109)])
            memory.save(60.0)
    """
    processes = [warm.piped(str(100 * i), code=textwrap.dedent(code)) for i in range(3)]
    assert [each.wait(120) for each in processes] == [0, 0, 0]
    for each in processes:
        each.close()
    result = firsts(path)
    assert sorted(result) == [100 * i + j for i in range(3) for j in range(40)]
    assert [each for each in result if each < 100] == list(range(40))
    assert os.listdir(tmp_path) == ["answers"]


def test_while_another_process_holds_it_answers_wait(tmp_path, caplog):
    path = written(tmp_path / "answers", 1)
    memory, other = opened(path), opened(path)
    memory.add(answer(2))
    with other._locked(0.0):
        memory.save()
        assert caplog.text == ""
        memory.save(0.1)
        assert caplog.text.count("\n") == 1
        assert f"another process holds {path}" in caplog.text
    memory.save()
    assert firsts(path) == [1, 2]


def test_a_file_that_changed_hands_is_not_written(tmp_path, caplog):
    path = tmp_path / "answers"
    memory = opened(path)
    other = opened(path, model="f" * 16)
    memory.add(answer(1))
    memory.save()
    other.add(answer(2))
    other.save()
    assert "belongs to another model" in caplog.text
    assert firsts(path) == [1]
    path.chmod(0o644)
    memory.add(answer(3))
    memory.save()
    assert "chmod 600" in caplog.text
    assert firsts(path) == [1]
    path.unlink()
    memory.save()
    assert firsts(path) == [3]
    assert len(caplog.records) == 2


def strange(path, **changes):
    tensors = {**load_file(written(path, 1, 2)), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    path.chmod(0o600)


def half(path):
    content = written(path, 1, 2).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def private(path, content=b""):
    path.write_bytes(content)
    path.chmod(0o600)


def sparse(path):
    private(path)
    os.truncate(path, (1 << 30) + 1)


def bfloat16(path):
    numbers = {name: torch.ones(3, dtype=torch.bfloat16) for name in ("tokens", "lengths", "model")}
    save_torch(numbers, path)
    path.chmod(0o600)


def link(path):
    written(path.with_name("other"), 1)
    path.symlink_to("other")


def for_others(mode):
    return lambda path: written(path, 1).chmod(mode)


REFUSED = {
    "half": (half, "is damaged"),
    "text": (lambda path: private(path, b"Dear diary\n"), "is damaged"),
    "zeros": (lambda path: private(path, bytes(1000)), "is damaged"),
    "huge": (sparse, "is larger than"),
    "bfloat16": (bfloat16, "is damaged"),
    "no lengths": (lambda path: strange(path, lengths=None), "is damaged"),
    "no model": (lambda path: strange(path, model=None), "is damaged"),
    "no text": (lambda path: strange(path, model=np.full(16, 200, np.uint8)), "is damaged"),
    "long": (lambda path: strange(path, lengths=np.array([2**63 - 1, 2**63 - 1, 22])), "is damaged"),
    "negative": (lambda path: strange(path, lengths=np.array([21, -1])), "is damaged"),
    "fractions": (lambda path: strange(path, tokens=np.ones(20, np.float32)), "is damaged"),
    "square": (lambda path: strange(path, tokens=np.ones((4, 5), np.int32)), "is damaged"),
    "outside": (lambda path: strange(path, tokens=np.full(20, VOCAB, np.int32)), "tokens that the model lacks"),
    "below": (lambda path: strange(path, tokens=np.full(20, -1, np.int32)), "tokens that the model lacks"),
    "wide": (lambda path: strange(path, tokens=np.full(20, 2**63 + 5, np.uint64)), "tokens that the model lacks"),
    "another model": (lambda path: strange(path, model=np.frombuffer(b"fedcba9876543210", np.uint8)), "another model"),
    "folder": (lambda path: path.mkdir(), "directory"),
    "link": (link, "cannot be used"),
    "dangling": (lambda path: path.symlink_to("nothing"), "cannot be used"),
    "fifo": (lambda path: os.mkfifo(path, 0o600), "not a file"),
    "read by the group": (for_others(0o640), "others can use it"),
    "written by others": (for_others(0o602), "others can use it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_file_is_refused_and_left_as_it_is(tmp_path, name):
    make, message = REFUSED[name]
    path = tmp_path / "answers"
    make(path)
    regular = path.is_file() and path.stat().st_size < 1 << 20
    before = (path.lstat(), path.read_bytes() if regular else None)
    error = refused(ConfigError, message, opened, path)
    assert "answers" in str(error)
    assert "name another file" in str(error) or "remove it" in str(error)
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (
        before[0].st_ino, before[0].st_mode, before[0].st_mtime_ns,
    )  # fmt: skip
    assert not regular or path.read_bytes() == before[1]


def test_a_folder_that_is_not_there_or_that_others_can_write(tmp_path):
    refused(ConfigError, "No such file", opened, tmp_path / "none" / "answers")
    (tmp_path / "round").symlink_to("round")
    for name in ("a\0b", "\ud800", "x" * 300, "~no-such-user/x", tmp_path / "round" / "answers"):
        refused(ConfigError, "cannot be used", opened, name)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    refused(ConfigError, "others may write to", opened, tmp_path / "shared" / "answers")
    assert not (tmp_path / "shared" / "answers").exists()


def test_any_damage_is_read_or_refused_in_one_line(tmp_path):
    path = written(tmp_path / "answers", *range(20))
    content, draw = path.read_bytes(), random.Random(0)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(content[: draw.choice([len(content), draw.randrange(len(content))])])
        for _ in range(draw.randrange(4)):
            if damaged:
                damaged[draw.randrange(min(len(damaged), draw.choice([8, 300, len(damaged)])))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            store = opened(path).store
        except ConfigError as error:
            outcomes.add(str(error).replace(str(path), ""))
        else:
            assert store is None or all(0 <= token <= VOCAB for token in store.tokens)
            outcomes.add("read")
    assert "read" in outcomes
    assert 2 < len(outcomes) < 6
    assert "\n" not in "".join(outcomes)


def test_another_models_file_is_refused_by_an_engine(tiny_target, tiny_draft, tmp_path):
    options = {"speculative_config": {"method": "suffix"}, "memory": str(tmp_path / "answers")}
    generate(tiny_target, **options)
    refused(ConfigError, "belongs to another model", LLM, tiny_draft, **options)


def test_nothing_is_kept_without_it(tiny_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with LLM(tiny_target, speculative_config={"method": "suffix"}) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert llm.engine.memory is None
    assert list(tmp_path.iterdir()) == []
