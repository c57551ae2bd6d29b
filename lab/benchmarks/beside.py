"""A short question beside a neighbour's long prompt: its first token, and what both lose.

    python lab/benchmarks/beside.py MODEL --prompts 500,1500,8000 --turns 3

In each turn the question is asked alone, the long prompt is answered alone, and then the question is asked while
another long prompt is read. ``first`` is the question's time to the first token over that alone (at most 3 is asked),
``both`` the seconds of both alone over those of both together (at least 0.95), ``neighbour`` the seconds of the long
request over those alone.
"""

from __future__ import annotations

import argparse
from time import perf_counter

from auto import texts

from forerun import LLM, SamplingParams
from forerun.measure.environment import processor
from forerun_lab.intervals import shown

SHORT, TOKENS = 50, 16


def answer(llm: LLM, long: list[int] | None, short: list[int] | None, later: float) -> dict[str, float]:
    """Seconds until both are answered, until the question's first token, and until the long prompt's last.

    ``later``: seconds between the two requests. The question waits for the round that it comes into.
    """
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    begin = perf_counter()
    seen: dict[str, float] = {}
    neighbour = engine.add(long, params)[0] if long is not None else None
    question, asked = None, begin + (later if long is not None else 0.0)
    while engine.busy or (short is not None and question is None):
        if short is not None and question is None and (long is None or perf_counter() - begin > later):
            question = engine.add(short, params)[0]
        engine.step()
        now = perf_counter()
        if question is not None and question.output_ids:
            seen.setdefault("first", now - asked)
        if neighbour is not None and neighbour.finish is not None:
            seen.setdefault("neighbour", now - begin)
    return {**seen, "all": perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", default="500,1500,8000")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    lengths = [int(length) for length in options.prompts.split(",")]
    llm = LLM(options.model, max_model_len=max(lengths) + SHORT + 2 * TOKENS, max_num_seqs=4)
    print(processor())
    questions = texts(llm.get_tokenizer(), SHORT, 1)
    llm.engine.scheduler.prefill_budget.bounded = True  # as in a server
    answer(llm, None, next(questions), 0.0)
    for length in lengths:
        prompts = texts(llm.get_tokenizer(), length, length)
        ratios: dict[str, list[float]] = {"first": [], "both": [], "neighbour": []}
        for _ in range(options.turns):
            question, long = answer(llm, None, next(questions), 0.0), answer(llm, next(prompts), None, 0.0)
            both = answer(llm, next(prompts), next(questions), min(0.2, 0.1 * long["all"]))
            ratios["first"].append(both["first"] / question["first"])
            ratios["both"].append((question["all"] + long["all"]) / both["all"])
            ratios["neighbour"].append(both["neighbour"] / long["neighbour"])
            print(length, {name: round(each[-1], 2) for name, each in ratios.items()}, flush=True)
        print(f"prompts of {length}:", ", ".join(f"{name} {shown(each)}" for name, each in ratios.items()), flush=True)


if __name__ == "__main__":
    main()
