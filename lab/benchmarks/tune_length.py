"""What ``adaptive`` loses on simulated processors: its regret against the best fixed depth in hindsight, by cell.

``PYTHONPATH=tests/helpers python lab/benchmarks/tune_length.py [NAME=VALUE ...]`` tries other values of its constants.
Speeds are over plain decoding in undisturbed work, the policy's own time included; now and then the machine is busy.
Each cell is a processor and a kind of requests, by how often their drafts are accepted. Those held out come last, with
a mean of their own: they show whether a value is good elsewhere, too, so choose no value by them. At the end, policies
begin with a price table that an earlier process has kept: right, too cheap or too dear, on a steady machine and on one
whose level jumps up to twofold.
"""

import json
import random
import sys
from bisect import bisect_right
from functools import partial
from math import sin
from statistics import mean

from forerun.speculate.length.adaptive import Adaptive
from simulated import Machine, play

SEEDS, ANSWERS, LENGTH, DEPTH = 3, 16, 96, 6
HEAD = {
    "per_sequence": 0.0, "draft": 0.3, "per_level": 0.4, "per_draft_token": 0.0, "per_token_behind": 0.0, "multiple": 1,
    "host": 0.1, "jitter": 0.06,
}  # fmt: skip
"""A small model and its head, which is cheap beside the target."""
PROCESSORS = {
    "Xeon, two threads": {**HEAD, "base": 3.2, "prices": (1.0, 1.15, 1.45, 1.62, 1.84)},
    "Xeon, one thread": {**HEAD, "base": 6.2, "prices": (1.0, 1.0, 1.06, 1.27, 1.22)},
    "Zen 5": {**HEAD, "base": 3.0, "prices": (1.0, 1.04, 1.08, 1.12, 1.16, 1.2)},
    "Zen 3": {**HEAD, "base": 4.5, "prices": (1.0, 1.25, 1.5, 1.7, 1.95)},
    "H100": {**HEAD, "base": 2.6, "prices": (1.0, 1.02, 1.03, 1.05, 1.06, 1.08)},
    "another load after two seconds": {
        **HEAD, "base": 3.2, "prices": (1.0, 1.05, 1.1, 1.15), "later": (2.0, (1.0, 1.4, 1.8, 2.2)),
    },
    "the 1.5B pair": {
        "base": 33.0, "per_sequence": 0.3, "per_row": 1.6, "draft": 1.0, "per_level": 8.0, "per_draft_token": 0.8,
        "per_token_behind": 1.1, "cold_penalty": 0.03, "host": 0.3, "multiple": 1,
    },
    "the bundled pair": {
        "base": 0.34, "per_sequence": 0.045, "per_row": 0.06, "draft": 0.05, "per_level": 0.017,
        "per_draft_token": 0.0133, "per_token_behind": 0.0025, "cold_penalty": 0.12, "thaws": 2.5, "host": 0.02,
        "jitter": 0.06, "multiple": 1,
    },
}  # fmt: skip
KINDS = {"poor": (0.0, 0.2), "middling": (0.5, 0.5), "good": (0.8, 0.8), "mixed": (0.0, 0.9)}
"""Least and largest acceptance rate of a request."""


HELD_OUT = {
    "AMX, two threads, 8B and a head": {
        **HEAD, "base": 95.0, "draft": 3.0, "per_level": 7.0, "host": 0.4, "prices": (1.0, 1.15, 1.45, 1.62, 1.84),
    },
    "AMX, one thread, look-up": {
        **HEAD, "base": 6.2, "draft": 0.02, "per_level": 0.05, "looks_up": True, "prices": (1.0, 1.0, 1.06, 1.27, 1.22),
    },
    "GPU with dear launches": {
        **HEAD, "base": 5.5, "draft": 1.3, "per_level": 1.1, "host": 0.25, "jitter": 0.02,
        "prices": (1.0, 1.01, 1.01, 1.02, 1.02, 1.03, 1.03, 1.03, 1.15),
    },
    "cheaper half-way": {**HEAD, "base": 4.0, "prices": (1.0, 1.35, 1.7, 2.05), "later": (3.0, (1.0, 1.06, 1.12, 1.2))},
    "dearer half-way": {**HEAD, "base": 2.2, "prices": (1.0, 1.03, 1.05, 1.2), "later": (1.6, (1.0, 1.5, 1.75, 1.9))},
    "noise in minutes": {
        **HEAD, "base": 3.7, "prices": (1.0, 1.1, 1.22, 1.31, 1.4), "spikes": 0.03,
        "slow": lambda seconds: (1.0, 2.1, 1.35, 1.0, 1.6)[int(seconds / 1.9) % 5],
    },
    "a slow laptop": {
        "base": 88.0, "per_sequence": 0.5, "per_row": 8.5, "draft": 4.0, "per_level": 26.0, "per_draft_token": 1.5,
        "per_token_behind": 3.4, "cold_penalty": 0.06, "host": 0.6, "multiple": 1,
        "slow": lambda seconds: 1.0 + 0.9 * sin(0.6 * seconds) ** 4,
    },
    "ARM, lanes of four": {
        **HEAD, "base": 7.0, "draft": 0.5, "per_level": 0.8, "prices": (1.0, 1.02, 1.05, 1.08, 1.62, 1.64),
    },
    "four streams, Zen 4": {
        **HEAD, "base": 3.4, "per_sequence": 0.15, "per_draft_token": 0.1, "streams": 4,
        "prices": (1.0, 1.06, 1.11, 1.17, 1.26, 1.36, 1.46, 1.58, 1.7, 1.82, 1.94, 2.06),
    },
}  # fmt: skip
HELD_OUT_KINDS = {
    "falling": lambda request, position: 0.85 - 0.75 * min(1.0, position / LENGTH),
    "bursts": lambda request, position: 0.95 if position % 64 < 24 else 0.15,
    "few": lambda request, position: 0.88 if request % 4 == 1 else 0.05,
    "topics": lambda request, position: 0.1 if request < 8 else 0.78,
    "even": lambda request, position: 0.66,
}
"""Acceptance by request and position."""


OF_HEADS = {
    "AMX": {**HEAD, "base": 3.2, "draft": 0.2, "per_level": 0.6, "prices": (1.0, 1.2, 1.47, 1.7, 1.95)},
    "Ice Lake": {**HEAD, "base": 4.5, "per_level": 0.35, "prices": (1.0, 1.12, 1.25, 1.37, 1.5)},
    "Zen 5": {**HEAD, "base": 2.3, "draft": 0.25, "per_level": 0.12, "prices": (1.0, 1.06, 1.12, 1.16, 1.22, 1.32)},
}
"""SmolLM2 and its head, as measured on two threads."""
RATES = (0.2, 0.4, 0.6, 0.75)
KEPT = {"right": 1.0, "too cheap": 0.6, "too dear": 1.7}
"""What a kept table says of the rows beyond the first, over what they cost."""


def busy(seconds):
    return 1.6 if int(seconds / 0.7) % 3 == 1 else 1.0


def jumps():
    """A level between 1 and 2, which holds for 0.02 to 2 seconds."""
    draw, ends, levels = random.Random(7), [0.0], [1.0]
    while ends[-1] < 200.0:
        ends.append(ends[-1] + draw.choice([0.02, 0.1, 0.5, 2.0]))
        levels.append(draw.uniform(1.0, 2.0))
    return lambda seconds: levels[bisect_right(ends, seconds % 199.0) - 1]


def kept(costs, factor, seed):
    """What a process without disturbances keeps, but for the prices of its rows, and for what it has learnt."""
    state = json.loads(play(Machine(**costs), "adaptive", 1, lambda *_: 0.5, depth=DEPTH, requests=1, seed=seed).kept)
    for *_, table in state["prices"]:
        one = table["verify"]["1"]
        table["verify"] = {rows: one + factor * (price - one) for rows, price in table["verify"].items()}
    return json.dumps({**state, "drafting": [], "lookups": [], "rests": [], "lengths": []})


def run(policy, processor, kind, seed, depth=DEPTH):
    draw = random.Random(seed)
    rates = [draw.uniform(*KINDS[kind]) for _ in range(ANSWERS)] if kind in KINDS else []
    accepts = HELD_OUT_KINDS.get(kind, lambda request, _: rates[request])
    costs = {"slow": busy, **(PROCESSORS | HELD_OUT)[processor]}
    streams = costs.pop("streams", 1)
    requests = ANSWERS * streams
    return play(Machine(**costs), policy, streams, accepts, depth=depth, length=LENGTH, requests=requests, seed=seed)


def speed(runs):
    return sum(each.plain_work for each in runs) / sum(each.work for each in runs)


def main():
    for given in sys.argv[1:]:
        name, value = given.split("=")
        setattr(Adaptive, name, type(getattr(Adaptive, name))(float(value)))
    measure("regret", PROCESSORS, KINDS)
    measure("held out", HELD_OUT, HELD_OUT_KINDS)
    for name, slow in {"steady": {}, "jumping": {"slow": jumps()}}.items():
        measure_kept(name, slow)


def measure(name, processors, kinds):
    regrets, slowest = [], []
    for processor in processors:
        for kind in kinds:
            fixed = [speed([run("fixed", processor, kind, s, d) for s in range(SEEDS)]) for d in range(1, DEPTH + 1)]
            runs = [run("adaptive", processor, kind, s) for s in range(SEEDS)]
            best, own = max(1.0, *fixed), speed(runs)
            regrets.append(1.0 - own / best)
            slowest += [each.slowest() for each in runs]
            print(f"{processor:32} {kind:9} best {best:5.2f}  adaptive {own:5.2f}  regret {regrets[-1]:6.1%}")
    low = [min(each, 1.0) for each in slowest]
    print(f"{name}: mean {mean(regrets):.2%}, at most {max(regrets):.2%}; 200 rounds: {mean(low):.3f}, {min(low):.3f}")


def measure_kept(name, slow):
    regrets = {factor: [] for factor in KEPT}
    for processor, costs in OF_HEADS.items():
        for rate in RATES:
            one = partial(run_kept, {**costs, **slow, "follows": 0.1}, rate)
            best = max(1.0, *(speed([one("fixed", d, seed) for seed in range(SEEDS)]) for d in range(1, DEPTH + 1)))
            for factor, each in regrets.items():
                tables = [kept(costs, KEPT[factor], seed) for seed in range(SEEDS)]
                each.append(1.0 - speed([one("adaptive", DEPTH, *given) for given in enumerate(tables)]) / best)
            shown = "  ".join(f"{factor} {each[-1]:6.1%}" for factor, each in regrets.items())
            print(f"{processor:9} {name:8} {rate}  best {best:5.2f}  regret, kept prices {shown}")
    for factor, each in regrets.items():
        print(f"{name}, kept prices {factor}: mean {mean(each):.2%}, at most {max(each):.2%}")


def run_kept(costs, rate, policy, depth, seed, table=None):
    given = {"depth": depth, "length": LENGTH, "requests": 12, "seed": seed, "kept": table}
    return play(Machine(**costs), policy, 1, lambda *_: rate, **given)


if __name__ == "__main__":
    main()
