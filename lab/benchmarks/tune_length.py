"""What ``adaptive`` wins and loses on a simulated machine with the bundled pair's prices, by load and acceptance.

``PYTHONPATH=tests/unit python lab/benchmarks/tune_length.py [NAME=VALUE ...]`` tries other values of its constants.
Speeds are over plain decoding in undisturbed work, the policy's own time included; a third of the time the machine is
busy. Acceptance varies from request to request (standard deviation 0.12).
"""

import random
import sys
from statistics import mean

from simulated import Machine, play

from forerun.speculate.length.adaptive import Adaptive

SEEDS = 14
PLAN, DRAFTED, PLAIN = 0.12e-3, 0.015e-3, 0.003e-3
"""Seconds of the policy itself: a plan, a round with drafts, any round."""
PRICES = {
    "base": 0.34, "per_sequence": 0.045, "per_row": 0.06, "draft": 0.05, "per_level": 0.017, "per_draft_token": 0.0133,
    "per_token_behind": 0.0025, "cold_penalty": 0.12, "thaws": 2.5, "host": 0.03, "jitter": 0.06, "multiple": 1,
}  # fmt: skip
USELESS = 300
"""Tokens before drafts become good, where recovery is asked for."""
plans = 0


def count_plans():
    decide = Adaptive._make_plan

    def counting(self, *given):
        global plans
        plans += 1
        return decide(self, *given)

    Adaptive._make_plan = counting


def rates(mean_rate, seed, useless):
    draw, known = random.Random(seed), {}

    def accepts(request, position):
        if request not in known:
            known[request] = min(max(mean_rate + draw.gauss(0.0, 0.12), 0.0), 0.98)
        return 0.1 if position < useless else known[request]

    return accepts


def run(policy, count, rate, length, seed, depth=3, useless=0):
    """Speed over plain decoding."""
    global plans
    plans = 0
    machine = Machine(**PRICES, slow=lambda seconds: 1.5 if int(seconds / 0.11) % 3 == 1 else 1.0)
    requests = count * (16 if length == 64 else 1 if useless else 4)
    accepts = rates(rate, seed, useless)
    result = play(machine, policy, count, accepts, depth=depth, length=length, requests=requests, seed=seed)
    drafted = sum(nodes > 0 for nodes in result.drafted)
    work = result.work - 1e-3 * machine.host * drafted
    if policy == "adaptive":
        work += PLAN * plans + DRAFTED * drafted + PLAIN * result.rounds
    return result.plain_work / work


def best_fixed(count, rate, length):
    return max(mean(run("fixed", count, rate, length, seed, depth) for seed in range(2)) for depth in (1, 2, 3))


def main():
    for given in sys.argv[1:]:
        name, value = given.split("=")
        setattr(Adaptive, name, type(getattr(Adaptive, name))(float(value)))
    count_plans()
    print(f"{'tokens':>6} {'at once':>7} {'rate':>4} {'best fixed':>10} {'adaptive':>8} {'worst run':>9}")
    regrets, means = [], []
    for length, count, rate, useless in [
        *(
            (length, count, rate, 0)
            for length in (64, 256)
            for count in (1, 4, 8, 16)
            for rate in (0.79, 0.61, 0.4, 0.1)
        ),
        *((1200, count, 0.79, USELESS) for count in (1, 4, 8)),
    ]:
        ideal = best_fixed(count, rate, length if not useless else length - useless)
        if useless:
            ideal = length / (useless + (length - useless) / ideal)
        result = [run("adaptive", count, rate, length, seed, useless=useless) for seed in range(SEEDS)]
        regrets.append(1.0 - mean(result) / max(ideal, 1.0))
        means.append(mean(result))
        late = "  drafts useless at first" if useless else ""
        print(f"{length:6} {count:7} {rate:4} {ideal:10.2f} {mean(result):8.3f} {min(result):9.3f}{late}", flush=True)
    low = sum(speed < 0.97 for speed in means)
    print(f"mean regret {mean(regrets):.4f}, lowest mean {min(means):.3f}, below 0.97: {low} of {len(means)}")


if __name__ == "__main__":
    main()
