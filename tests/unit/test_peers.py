"""Other implementations in the benchmark's turns."""

from __future__ import annotations

import sys

import pytest

from forerun import SamplingParams
from forerun.bench.contenders import EngineContender
from forerun.bench.peers import outside, peer_contenders
from forerun.core.errors import ConfigError

pytestmark = pytest.mark.slow


def test_peers_answer_the_same_prompts_with_the_same_counts(llm, tiny_draft):
    target = llm()
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 11]]
    params = [SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)] * 2
    mine = EngineContender("none", target, {"method": "none"}, 1).run(prompts, params).answers
    peers = peer_contenders(["transformers"], target, tiny_draft, 1, 32)
    assert [peer.name for peer in peers] == ["transformers", "transformers_prompt_lookup", "transformers_assisted"]
    for peer in peers:
        found = peer.run(prompts, params)
        assert found.answers == mine
        assert found.seconds > 0
        assert 0 < found.tokens <= 18


STUB = """
import json, os, sys
about = json.loads(sys.stdin.readline())
if not os.path.isfile(about["model"]):
    sys.exit("no file")
print(json.dumps({"version": "1", "rows": ["stub"], "about": f"{about['threads']} threads"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    assert asked["row"] == "stub" and set(asked["seeds"]) == {7}, "asked for something else"
    assert len(asked["prompts"]) <= about["sequences"], "too many"
    count = asked["max_tokens"] if not asked["ends"] else 2
    answers = [[prompt[-1]] * count for prompt in asked["prompts"]]
    print(json.dumps({"answers": answers, "tokens": sum(map(len, answers)) - len(answers), "seconds": 0.5}), flush=True)
"""


@pytest.mark.parametrize("together", [1, 2])
def test_a_peer_runs_in_a_python_of_its_own(llm, monkeypatch, tmp_path, together):
    monkeypatch.setattr(outside, "WORKERS", tmp_path)
    (tmp_path / "llama_cpp_worker.py").write_text(STUB)
    (peer,) = peer_contenders([f"llama-cpp={sys.executable}"], llm(), None, together, 32)
    found = peer.run([[1, 2], [3]], [SamplingParams(max_tokens=4, seed=7, ignore_eos=True)] * 2)
    assert (found.answers, found.tokens, found.seconds) == ([[2] * 4, [3] * 4], 6, 1.0 / together)
    assert peer.run([[5]], [SamplingParams(max_tokens=4, seed=7)]).answers == [[5, 5]]
    assert peer.facts()["model_path"] == "1 threads (llama_cpp 1)"
    with pytest.raises(
        ConfigError, match="the llama-cpp peer ended with status 1: AssertionError: asked for something"
    ):
        peer.run([[5]], [SamplingParams(max_tokens=4, seed=8)])
    peer.close()


@pytest.mark.parametrize(
    ("python", "why"),
    [("/no/python", "cannot be started"), (sys.executable, r"status 1: ModuleNotFoundError.*see docs/bench\.md")],
)
def test_a_peer_that_is_not_there_is_named(llm, python, why):
    with pytest.raises(ConfigError, match=f"the openvino peer.*{why}"):
        peer_contenders([f"openvino={python}"], llm(), None, 1, 32)
