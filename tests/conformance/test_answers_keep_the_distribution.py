"""Under a rule that compares p with q, answers keep the target's distribution: q is what the tokens were drawn from."""

from collections import Counter

import pytest
import torch
from matrix import CHAINS
from scipy import stats
from transformers import LlamaForCausalLM

from forerun import SamplingParams
from forerun.speculate.draft import drafters
from tiny import ALPHABET

REQUESTS = 400
TOKENS = 4
PROMPT = "hello world, hello"
BIAS = {ALPHABET.index("l"): 5.0, ALPHABET.index("o"): 5.0}
"""So that answers repeat what is in the prompt, and there is something to copy."""
PARAMS = {"logit_bias": BIAS, "temperature": 1.2, "top_k": 2, "max_tokens": TOKENS, "ignore_eos": True}
DRAFTERS = [case for case in CHAINS if case.method in list(drafters) and not drafters[case.method].needs.grammar]


@pytest.fixture(scope="module")
def distribution(tiny_target, engine):
    """The exact distribution of an answer, enumerated with transformers' logits."""
    model = LlamaForCausalLM.from_pretrained(tiny_target).eval()
    prompt = engine().tokenizer.encode(PROMPT)
    answers = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for tokens, mass in answers.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
            logits[list(BIAS)] += torch.tensor(list(BIAS.values())).double()
            values, ids = (logits / PARAMS["temperature"]).topk(PARAMS["top_k"])
            for token, fraction in zip(ids.tolist(), values.softmax(0).tolist()):
                longer[*tokens, token] = mass * fraction
        answers = longer
    return answers


@pytest.mark.parametrize("case", DRAFTERS, ids=str)
def test_the_answers_keep_the_targets_distribution(engine, keys, distribution, case):
    """400 requests with seeds of their own, 64 at a time."""
    rule = "recursive" if case.method == "merged" else "token"
    speculating = engine(keys(case, accept=rule, num_speculative_tokens=2), max_num_seqs=64)
    prompt = speculating.tokenizer.encode(PROMPT)
    jobs = [speculating.add(prompt, SamplingParams(seed=seed, **PARAMS))[0] for seed in range(REQUESTS)]
    while speculating.busy:
        speculating.step()
    assert not any(job.metrics.draft_error for job in jobs)
    assert sum(job.metrics.num_draft_tokens for job in jobs) > 0
    assert pvalue(jobs, distribution) > 1e-4


def pvalue(jobs, distribution):
    """Chi-square of whole answers; those expected fewer than five times count as one."""
    counts = Counter(tuple(job.output_ids) for job in jobs)
    assert set(counts) <= set(distribution)
    rare = {answer for answer, chance in distribution.items() if len(jobs) * chance < 5}
    cells = [[answer] for answer in distribution if answer not in rare] + [rare] * bool(rare)
    observed = [sum(counts[answer] for answer in cell) for cell in cells]
    expected = [len(jobs) * sum(distribution[answer] for answer in cell) for cell in cells]
    return float(stats.chisquare(observed, [each * len(jobs) / sum(expected) for each in expected]).pvalue)
