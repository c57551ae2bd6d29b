"""The pages that add an acceptance rule and a family, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
import sys
import torch, transformers
import my_family
from forerun import LLM, SamplingParams

config = transformers.MinistralConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=8, bos_token_id=1, eos_token_id=None,
    layer_types=["sliding_attention", "full_attention"],
)
torch.manual_seed(0)
theirs = transformers.MinistralForCausalLM(config).float().eval()
theirs.save_pretrained(sys.argv[1])
ids = list(range(2, 22))
expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids):].tolist()
llm = LLM(sys.argv[1], model_path="native", tokenizer=sys.argv[2])
answer = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
print(answer.outputs[0].token_ids == expected)
"""


def run(folder: Path, page: str, script: str | None, *arguments: str) -> str:
    """The page's first block as a module, and its second, or ``script``, run beside it; what that prints."""
    text = (ROOT / "docs" / "extend" / page).read_text(encoding="utf-8")
    module, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (folder / module.split("\n")[0].removeprefix("# ")).write_text(module, encoding="utf-8")
    (folder / "example.py").write_text(script or example, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(folder / "example.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_rule(tmp_path: Path) -> None:
    histogram = run(tmp_path, "rule.md", None).strip()
    assert re.fullmatch(r"[\[(]\d+, \d+(, 0)*[\])]", histogram)


@pytest.mark.slow
def test_a_family(tmp_path: Path, tiny_target: str) -> None:
    assert run(tmp_path, "family.md", CHECK, str(tmp_path / "model"), tiny_target).endswith("True\n")
