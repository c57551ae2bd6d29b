"""Speculative execution of any function of another one's outcome: the paper's idea without a language model.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023,
arXiv 2211.17192), called [L] below.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forerun.core.errors import ConfigError

X = TypeVar("X")
Y = TypeVar("Y", bound=Hashable)
Z = TypeVar("Z")

TOLERANCE = 1e-6
"""Largest deviation of the sum of a distribution from 1."""


@dataclass(frozen=True)
class Execution(Generic[Y, Z]):
    """The result of ``speculate``."""

    value: Z
    """``g(drawn)``."""
    drawn: Y
    guesses: tuple[Y, ...]
    """The outcomes on which ``g`` was started, in the order of drawing."""
    hit: bool
    """``g`` was running on ``drawn`` before ``f`` had ended."""
    guess_error: Exception | None = None
    """Why there were no guesses, if guessing failed."""


def settle(p: Mapping[Y, float], q: Mapping[Y, float], guesses: Sequence[Y]) -> dict[Y, float]:
    """The distribution of the outcome, given ``guesses`` drawn independently from ``q``: each in turn is kept with
    probability min(1, p / q), and p becomes the rest, norm(max(p - q, 0)), where it is not ([L], section 2.3, once per
    guess). Averaged over the guesses it is ``p``."""
    distribution: dict[Y, float] = {}
    residual, remaining = dict(p), 1.0
    for guess in guesses:
        accepted = remaining * min(1.0, residual.get(guess, 0.0) / q[guess])
        distribution[guess] = distribution.get(guess, 0.0) + accepted
        remaining -= accepted
        excess = {y: max(fraction - q.get(y, 0.0), 0.0) for y, fraction in residual.items()}
        mass = math.fsum(excess.values())
        if remaining <= 0.0 or mass <= 0.0:
            return distribution
        residual = {y: fraction / mass for y, fraction in excess.items()}
    for y, fraction in residual.items():
        distribution[y] = distribution.get(y, 0.0) + remaining * fraction
    return distribution


def speculate(
    f: Callable[[X], Mapping[Y, float]],
    g: Callable[[Y], Z],
    guess: Callable[[X], Mapping[Y, float]],
    x: X,
    *,
    seed: int | None = None,
    guesses: int = 1,
    executor: Executor | None = None,
) -> Execution[Y, Z]:
    """``g(y)`` for a y drawn from ``f(x)``, with ``g`` started on up to ``guesses`` draws from ``guess(x)`` meanwhile.

    ``f`` and ``guess`` return a probability for each outcome (``{y: 1.0}`` says that y is certain). ``executor`` runs
    ``f`` and ``g`` and needs ``guesses + 1`` workers to gain anything: threads by default, a ``ProcessPoolExecutor``
    for functions that keep the interpreter busy. ``seed`` fixes every draw, whatever the timing. ``g`` must not act on
    the world: it also runs on wrong guesses, whose errors are ignored.

    If ``guess`` raises or returns no distribution, only its time is lost. Errors of ``f``, and of ``g`` on the drawn
    outcome, are raised. Raises ConfigError for ``guesses`` below 0 and for an ``f`` that returns no distribution.
    """
    if guesses < 0:
        raise ConfigError(f"guesses must be at least 0, not {guesses}")
    if executor is None:
        threads = ThreadPoolExecutor(guesses + 1)
        try:
            return speculate(f, g, guess, x, seed=seed, guesses=guesses, executor=threads)
        finally:
            threads.shutdown(wait=False)  # wrong guesses end on their own
    rng = random.Random(seed)
    thinking = executor.submit(f, x)
    q: dict[Y, float] = {}
    error: Exception | None = None
    if guesses:
        try:
            q = _distribution("guess", guess(x))
        except Exception as raised:  # noqa: BLE001 - the caller's function; the result does not depend on it
            error = raised
    drawn = [_draw(q, rng) for _ in range(guesses)] if q else []
    running = {y: executor.submit(g, y) for y in dict.fromkeys(drawn)}
    try:
        p = _distribution("f", thinking.result())
        y = _draw(settle(p, q, drawn), rng)
        value = running[y].result() if y in running else g(y)
    finally:
        _cancel(running)
    return Execution(value, y, tuple(drawn), y in running, error)


def expected_latency(hit: float, f: float, g: float, guess: float = 0.0) -> float:
    """Seconds of ``speculate`` with a worker for everything, as in theorem 3.8 of [L]: ``g`` starts after
    ``guess``, and again, after ``f``, if no guess is accepted.

    ``hit``: probability that the outcome was guessed, 1 - (1 - alpha)^n for independent guesses kept with alpha each;
    ``f``, ``g``, ``guess``: seconds of a call. One after the other takes f + g.
    """
    return hit * max(f, guess + g) + (1.0 - hit) * (f + g)


def _distribution(name: str, result: Any) -> dict[Any, float]:
    """The outcomes that can occur. Raises ConfigError."""
    if not isinstance(result, Mapping):
        raise ConfigError(f"{name} must return a probability for each outcome, not {type(result).__name__}")
    fractions = {y: float(fraction) for y, fraction in result.items()}
    total = math.fsum(fractions.values())
    if not all(fraction >= 0.0 for fraction in fractions.values()) or not abs(total - 1.0) <= TOLERANCE:
        raise ConfigError(f"{name} must return probabilities that add up to 1, not to {total:g}")
    return {y: fraction / total for y, fraction in fractions.items() if fraction > 0.0}


def _draw(distribution: Mapping[Y, float], rng: random.Random) -> Y:
    possible = [(y, fraction) for y, fraction in distribution.items() if fraction > 0.0]
    return rng.choices([y for y, _ in possible], [fraction for _, fraction in possible])[0]


def _cancel(running: Mapping[Any, Future[Any]]) -> None:
    for future in running.values():
        future.cancel()
