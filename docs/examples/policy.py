"""A simulation behind a slow policy, run ahead on guesses: stochastic speculative execution without a language model.

The policy plays a pendulum forward for each torque and samples one, better ones more often (f). The torque is then
simulated in fine steps (g). Both take tens of milliseconds; g needs f's draw. A cheap rule guesses what the policy will
say, and the simulation starts on a draw from that. The last guess is a sound one and loses: it thinks longer than the
policy does, and what was found out early is late. Run it: ``python docs/examples/policy.py``
"""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from forerun_lab.execution import expected_latency, speculate

TORQUES = (-2.0, -1.0, 0.0, 1.0, 2.0)
State = tuple[float, float]


def move(state: State, torque: float, steps: int, seconds: float = 0.05) -> State:
    angle, speed = state
    dt = seconds / steps
    for _ in range(steps):
        speed += (9.81 * math.sin(angle) + torque * 3.0 - 0.1 * speed) * dt
        angle += speed * dt
    return math.remainder(angle, 2.0 * math.pi), speed


def softmax(values: list[float], sharpness: float) -> dict[float, float]:
    best = max(values)
    weights = [math.exp(sharpness * (value - best)) for value in values]
    return {torque: weight / sum(weights) for torque, weight in zip(TORQUES, weights)}


def policy(state: State) -> dict[float, float]:
    """f: rollouts with random torques behind each first one."""
    source = random.Random(0)
    returns = []
    for torque in TORQUES:
        total = 0.0
        for _ in range(700):
            at = move(state, torque, 4)
            for _ in range(10):
                at = move(at, source.choice(TORQUES), 4)
                total -= abs(at[0]) + 0.1 * abs(at[1])
        returns.append(total / 7000)
    return softmax(returns, 12.0)


def habit(state: State) -> dict[float, float]:
    """The guess: push against where it falls."""
    requested = -2.0 * state[0] - 0.6 * state[1]
    return softmax([-abs(torque - requested) for torque in TORQUES], 0.8)


def anything(state: State) -> dict[float, float]:
    """A guess that knows nothing."""
    return dict.fromkeys(TORQUES, 1.0 / len(TORQUES))


def pondered(state: State) -> dict[float, float]:
    """A guess that takes longer than what it guesses, as any drafter does that is dearer than its target."""
    policy(state)
    return policy(state)


def measure(name: str, steps: int, guess, pool: ProcessPoolExecutor) -> None:
    """Both ways in turns, from the same states; seconds of f, g and the guess by themselves."""
    state: State = (0.4, 0.0)
    after, ahead, slow, hits = [], [], [], 0
    for step in range(steps):
        simulate = Simulation(state)
        start = time.perf_counter()
        distribution = policy(state)
        middle = time.perf_counter()
        simulate(random.Random(step).choices(list(distribution), list(distribution.values()))[0])
        end = time.perf_counter()
        guess(state)
        guessed = time.perf_counter()
        run = speculate(policy, simulate, guess, state, seed=step, executor=pool)
        ahead.append(time.perf_counter() - guessed)
        after.append(end - start)
        slow.append((middle - start, end - middle, guessed - end))
        hits += run.hit
        state = run.value
    f, g, q = (median(each) for each in zip(*slow))
    print(
        f"{name}: f {f * 1e3:.0f} ms, g {g * 1e3:.0f} ms, a guess {q * 1e3:.0f} ms, right {hits} of {steps}; "
        f"one after the other {median(after) * 1e3:.0f} ms, speculating {sum(ahead) / steps * 1e3:.0f} ms on average, "
        f"theory {expected_latency(hits / steps, f, g, q) * 1e3:.0f} ms"
    )


class Simulation:
    """g: the world's next state, in steps fine enough to take a while."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __call__(self, torque: float) -> State:
        return move(self.state, torque, 350_000)


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as workers:
        list(workers.map(abs, range(8)))  # processes are there before the clock runs
        measure("a rule of thumb", 40, habit, workers)
        measure("no idea", 40, anything, workers)
        measure("a slow guess", 40, pondered, workers)
