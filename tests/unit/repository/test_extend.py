"""The pages that add a rule, a family, a length policy and a drafter that samples, as they stand there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.mark.slow
def test_examples_of_extensions(warm, tmp_path, tiny_target):
    """Each page's first block is a module; the others' second blocks, and ``CHECK`` of the family, run beside them."""
    examples = []
    for page in ("rule.md", "distribution.md", "policy.md", "family.md"):
        text = (ROOT / "docs" / "extend" / page).read_text(encoding="utf-8")
        module, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (tmp_path / module.split("\n")[0].removeprefix("# ")).write_text(module, encoding="utf-8")
        examples.append(example)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{''.join(examples[:3])}{CHECK}"
    done = warm.run(str(tmp_path / "model"), tiny_target, code=code)
    assert done.returncode == 0, done.stderr
    histogram, sampled, steps, same = done.stdout.strip().splitlines()[-4:]
    assert re.fullmatch(r"[1-9]\d* None", sampled)  # drafts, and no error
    assert re.search(r"\b[1-9]", steps)
    assert re.fullmatch(r"[\[(]\d+, \d+(, 0)*[\])]", histogram)
    assert same == "True"
