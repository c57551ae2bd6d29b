"""Loads: requests with arrival times, from a trace or random. Imports no library: a bad trace is refused at once."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from forerun.core.errors import ConfigError, shown

KEYS = ("arrival", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens")
"""Keys of a trace's lines; the last two belong together and are optional."""
COMPARISONS = 500_000
"""Most requests times replicas of one simulation, as a router compares them. Larger loads are sampled."""
LONGEST = 20_000
"""Most requests of one simulation; longer traces are sampled if there are several replicas."""
LATEST = 10**12
"""Largest arrival time in seconds: beyond it, floats cannot resolve a round."""
PREFIXES = 16
"""A prefix with more than one in this many of a sample's requests is sampled itself, not kept or dropped whole."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at ``at`` seconds with ``prompt`` tokens and ``output`` tokens of answer. The first ``shared`` prompt
    tokens are those of the text ``prefix``. If all are, the answer extends that text, as in a conversation."""

    at: float
    prompt: int
    output: int
    prefix: Hashable | None = None
    shared: int = 0


@dataclass(frozen=True)
class LoadPart:
    """A sample of a load: ``arrivals`` on ``replicas`` replicas. Figures leave out the first ``settling`` arrivals, in
    which queues and caches fill."""

    arrivals: Sequence[Arrival]
    replicas: int
    settling: int = 0


class Load(Protocol):
    """A load to be served."""

    def part(self, replicas: int, router: str = "affine") -> LoadPart:
        """The load, or a sample of load and replicas. With the ``router`` "random" every replica, and so every sample,
        sees every prefix; with others most prefixes are on few replicas."""

    def within(self, positions: int) -> Load:
        """The load for a model with ``positions``. Raises ConfigError if requests do not fit."""

    def longest(self) -> int:
        """Most tokens of a prompt."""

    def typical(self) -> Arrival:
        """Mean lengths, for measuring."""

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Trace:
    """Requests as they came, in order."""

    arrivals: Sequence[Arrival]
    seed: int = 0

    def part(self, replicas: int, router: str = "affine") -> LoadPart:
        """If a simulation would take too long, a fraction of the replicas gets the same fraction of the requests."""
        count = len(self.arrivals)
        if count * replicas <= COMPARISONS and count <= LONGEST:
            return LoadPart(self.arrivals, replicas)
        most = min(math.sqrt(COMPARISONS * replicas / count), replicas * LONGEST / count)
        kept = min(replicas, max(1, round(most)))
        together = 0.0 if router == "random" else count / replicas * min(1.0, kept / PREFIXES)
        return LoadPart(self._thinned(kept / replicas, together), kept)

    def _thinned(self, fraction: float, together: float) -> list[Arrival]:
        """A fraction of the requests. Those of a prefix with up to ``together`` requests are kept or dropped together,
        except for one prefix that makes the number right; all others are sampled one by one."""
        rng = random.Random(self.seed)
        sizes = Counter(one.prefix for one in self.arrivals if one.prefix is not None)
        alone: list[int] = []
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, one in enumerate(self.arrivals):
            whole = one.prefix is not None and sizes[one.prefix] <= together
            (groups[one.prefix] if whole else alone).append(index)
        several = list(groups.values())
        rng.shuffle(several)
        for group in several:
            rng.shuffle(group)
        grouped = [index for group in several for index in group]
        chosen = rng.sample(alone, round(fraction * len(alone))) + grouped[: round(fraction * len(grouped))]
        return [self.arrivals[index] for index in sorted(chosen)]

    def within(self, positions: int) -> Trace:
        for number, one in enumerate(self.arrivals, start=1):
            if one.prompt + one.output > positions:
                raise ConfigError(
                    f"request {number} of the trace has {one.prompt} prompt and {one.output} output tokens; the model "
                    f"has {positions} positions"
                )
        return self

    def longest(self) -> int:
        return max(one.prompt for one in self.arrivals)

    def typical(self) -> Arrival:
        count = len(self.arrivals)
        prompt, output, shared = (
            sum(getattr(one, name) for one in self.arrivals) / count for name in ("prompt", "output", "shared")
        )
        return Arrival(0.0, max(1, round(prompt)), max(1, round(output)), None, round(shared))

    def describe(self) -> dict[str, Any]:
        first, last, usual = self.arrivals[0].at, self.arrivals[-1].at, self.typical()
        rate = (len(self.arrivals) - 1) / (last - first) if last > first else None
        reported: dict[str, Any] = {"requests": len(self.arrivals), "rate": rate, "prompt_tokens": usual.prompt}
        return reported | {"output_tokens": usual.output, "shared_tokens": usual.shared}


@dataclass(frozen=True)
class SyntheticLoad:
    """Requests at random times, ``rate`` a second (Poisson). Lengths are lognormal with the means ``prompt`` and
    ``output`` and the coefficient of variation ``spread``; the first ``shared`` of a mean prompt's tokens, from 0 to 1,
    are those of one of ``prefixes`` texts. No request with its answer is longer than ``limit`` tokens."""

    rate: float
    prompt: int
    output: int
    spread: float = 0.0
    shared: float = 0.0
    prefixes: int = 16
    limit: int | None = None
    seed: int = 0

    SHARE = 16
    """Most replicas of a sample."""
    EACH = 300
    """Requests per replica, in addition to ``ALL``: enough to fill caches."""
    ALL = 1500
    SETTLING = 0.25

    def __post_init__(self) -> None:
        for name in ("rate", "spread", "shared"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "rate" and not value):
                raise ConfigError(
                    f"the {name} of a load must be {'above 0' if name == 'rate' else '0 or more'}, not {value!r}"
                )
        if self.shared > 1:
            raise ConfigError(f"the shared part of a prompt is a share from 0 to 1, not {self.shared!r}")
        if min(self.prompt, self.output, self.prefixes) < 1:
            raise ConfigError("prompts and answers of a load have a token or more, and there are 1 or more prefixes")
        if self.limit is not None and self.prompt + self.output > self.limit:
            raise ConfigError(
                f"prompts of {self.prompt} and answers of {self.output} tokens, at the mean, do not fit into the "
                f"model's {self.limit} positions"
            )

    def part(self, replicas: int, router: str = "affine") -> LoadPart:
        """The same distribution at a fraction of the rate, because thinned Poisson arrivals stay Poisson. There are
        fewer prefixes, each as frequent as before, unless routing is random."""
        kept = min(replicas, self.SHARE)
        fraction = kept / replicas
        prefixes = self.prefixes if router == "random" else max(1, round(self.prefixes * fraction))
        count = self.ALL + self.EACH * kept
        rng, now, arrivals = random.Random(self.seed), 0.0, []
        shared = self._shared_tokens()
        for _ in range(count):
            now += rng.expovariate(self.rate * fraction)
            prefix = rng.randrange(prefixes) if shared else None
            own = self._length(rng, self.prompt - shared)
            one = Arrival(now, shared + own, self._length(rng, self.output), prefix, shared)
            arrivals.append(self._fitting(one))
        return LoadPart(arrivals, kept, round(self.SETTLING * count))

    def _shared_tokens(self) -> int:
        """Shared tokens of a prompt: never all, because its answer is not shared."""
        return min(round(self.shared * self.prompt), self.prompt - 1)

    def _length(self, rng: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        width = math.log1p(self.spread**2)
        return max(1, round(rng.lognormvariate(math.log(mean) - width / 2, math.sqrt(width))))

    def _fitting(self, one: Arrival) -> Arrival:
        if self.limit is None or one.prompt + one.output <= self.limit:
            return one
        prompt = min(one.prompt, max(self.limit - self.output, self.limit // 2, 1))
        shared = min(one.shared, prompt - 1)
        return replace(one, prompt=prompt, output=min(one.output, self.limit - prompt), shared=shared)

    def within(self, positions: int) -> SyntheticLoad:
        return replace(self, limit=positions)

    def longest(self) -> int:
        return max(one.prompt for one in self.part(1).arrivals)

    def typical(self) -> Arrival:
        return Arrival(0.0, self.prompt, self.output, None, self._shared_tokens())

    def describe(self) -> dict[str, Any]:
        reported: dict[str, Any] = {"requests": None, "rate": self.rate, "prompt_tokens": self.prompt}
        return reported | {"output_tokens": self.output, "shared_tokens": self._shared_tokens()}


def read_trace(path: Path, seed: int = 0) -> Trace:
    """A line of JSON for each request, ``{"arrival": seconds, "prompt_tokens": ..., "output_tokens": ...}`` and, where
    it begins as others do, ``"prefix"``, a name or number, and ``"prefix_tokens"``. ConfigErrors name the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {' '.join(str(error).split())}") from None
    arrivals: list[Arrival] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            one = _arrival(line)
            if arrivals and one.at < arrivals[-1].at:
                raise ConfigError(f"arrival {one.at:g} is before the last one's, {arrivals[-1].at:g}: sort them")
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        arrivals.append(one)
    if not arrivals:
        raise ConfigError(f"{path} has no requests: write a line of JSON for each, with {', '.join(KEYS[:3])}")
    return Trace(arrivals, seed)


def _arrival(line: str) -> Arrival:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"no JSON: {shown(line)}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"a request is an object with {', '.join(KEYS[:3])}, not {shown(given)}")
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ConfigError(f"unknown key {shown(unknown[0])}; there are {', '.join(KEYS)}")
    at = given.get("arrival")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= LATEST:
        raise ConfigError(f"arrival must be seconds, from 0 to {LATEST:.0e}, not {shown(at)}")
    prompt, output = _count(given, "prompt_tokens"), _count(given, "output_tokens")
    prefix = given.get("prefix")
    if prefix is None and "prefix_tokens" not in given:
        return Arrival(float(at), prompt, output)
    if isinstance(prefix, bool) or not isinstance(prefix, str | int):
        raise ConfigError(f"prefix must be a name or a number, not {shown(prefix)}")
    shared = _count(given, "prefix_tokens")
    if shared > prompt:
        raise ConfigError(f"prefix_tokens is {shared}, more than the {prompt} of the prompt")
    return Arrival(float(at), prompt, output, prefix, shared)


def _count(given: dict[str, Any], key: str) -> int:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise ConfigError(f"{key} must be a whole number, 1 or more, not {shown(value)}")
    return value
