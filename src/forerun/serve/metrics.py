"""Prometheus' metrics, and the log: a line for each request, and one for every ten seconds with work."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from operator import sub
from time import perf_counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.core.registry import from_lab
from forerun.engine.client import ClosedError, Delta, EngineClient, Stream
from forerun.engine.metrics import EngineStats, Snapshot
from forerun.serve.stream import Reply

if TYPE_CHECKING:
    from forerun.serve.models import Models

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
WHOLE_ANSWER = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Collector:
    """Collects the counters of all engines, by the names of their models."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineClient] = {}

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for model, engine in list(self.engines.items()):
            for kind, name, text, labels, values in _metrics(engine.snapshot()):
                family = families.setdefault(name, kind(f"forerun:{name}", text, labels=["model_name", *labels]))
                for key, value in values.items():
                    family.add_metric([model, *key], value)
        yield from families.values()


def _metrics(now: Snapshot) -> Iterator[tuple[Any, str, str, list[str], Mapping[Any, float]]]:
    """Yields an engine's metrics: kind, name, help, labels, and values by the labels' values."""
    stats = now.stats
    for name, text, value in (
        ("num_requests_running", "sequences that decode or read their prompt", now.running),
        ("num_requests_waiting", "sequences in the queue, or set aside for a slow reader", now.waiting),
        ("kv_cache_usage_perc", "share of the target's KV pages in use", now.usage),
        ("threads", "CPU threads of the latest round", stats.threads),
        ("prefix_cache_hit_rate", "prompt tokens found in the prefix cache, of those looked up",
         stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0),
        ("prefix_cache_states", "states kept for prompts that begin alike", now.kept_states),
    ):  # fmt: skip
        yield GaugeMetricFamily, name, text, [], {(): value}
    for item in fields(stats):
        if "metric" in item.metadata:
            values = {(): getattr(stats, item.name)}
            yield CounterMetricFamily, item.metadata["metric"], item.metadata["help"], [], values
    by_position = {(str(i),): count for i, count in enumerate(list(stats.accepted_per_pos))}
    name, text = "spec_decode_num_accepted_tokens_per_pos", "accepted tokens by draft position"
    yield CounterMetricFamily, name, text, ["position"], by_position
    context = "the length of the text drafted for: at most this many tokens, more than half"
    for label, what, table in (
        ("context", context, dict(stats.by_context)), ("drafter", "drafter", dict(stats.by_drafter))
    ):  # fmt: skip
        for index, name in enumerate(("num_drafts", "num_draft_tokens", "num_accepted_tokens")):
            by_key = {(str(key),): counts[index] for key, counts in sorted(table.items())}
            yield CounterMetricFamily, f"spec_decode_{name}_by_{label}", f"{name} by {what}", [label], by_key
    seconds = {(phase,): getattr(stats, f"{phase}_seconds") for phase in ("draft", "verify", "accept", "host")}
    yield CounterMetricFamily, "round_seconds", "where the engine's time went", ["phase"], seconds


class Recorder:
    """The metrics of all engines."""

    def __init__(self, names: str) -> None:
        self.registry = CollectorRegistry()
        self.collector = Collector()
        self.registry.register(self.collector)
        if names == "vllm":
            self.registry.register(from_lab("vllm_metrics", "serve --metrics-names vllm").VllmNames(self.collector))

        def seconds(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"forerun:{name}_seconds", text, ["model_name"], buckets=buckets, registry=self.registry)

        self.first = seconds("time_to_first_token", "from arrival to the first token", FIRST_TOKEN)
        self.between = seconds("inter_token_latency", "a round's interval over its tokens, once per round", PER_TOKEN)
        self.whole = seconds("e2e_request_latency", "from arrival to the last token", WHOLE_ANSWER)
        self.ended = Counter(
            "forerun:request_success", "answers by why they ended", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip

    def follow(self, engine: EngineClient, model: str) -> None:
        """Records what ``engine`` does from now on, until ``leave``."""
        requests = RequestRecorder(self, model)
        engine.on_deltas, engine.on_forget = requests.observe, requests.forget
        self.collector.engines[model] = engine

    def leave(self, engine: EngineClient, model: str) -> None:
        if self.collector.engines.get(model) is engine:
            del self.collector.engines[model]

    def text(self) -> bytes:
        return generate_latest(self.registry)


class RequestRecorder:
    """Records latencies, and how requests ended, from all deltas of one engine in the event loop."""

    def __init__(self, recorder: Recorder, model: str) -> None:
        each = (recorder.first, recorder.between, recorder.whole)
        self.first, self.between, self.whole = (histogram.labels(model) for histogram in each)
        self.ended = {each: recorder.ended.labels(model, each) for each in ("stop", "length", "error", "abort")}
        self._latest: dict[tuple[Stream, int], float] = {}

    def observe(self, stream: Stream, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            key = (stream, delta.index)
            latest = self._latest.get(key)
            if latest is None:
                self.first.observe(delta.seconds - stream.arrival)
            elif delta.token_ids:
                self.between.observe((delta.seconds - latest) / len(delta.token_ids))
            self._latest[key] = delta.seconds
            if delta.finish is not None:
                self.whole.observe(delta.seconds - stream.arrival)
                self.ended[delta.finish.reason].inc()
                del self._latest[key]

    def forget(self, stream: Stream) -> None:
        if stream.unfinished:  # its reader left, or it was ended for being late or at shutdown
            self.ended["abort" if stream.error is None else "error"].inc(stream.unfinished)
        for job in stream.jobs:
            self._latest.pop((stream, job.index), None)


INTERVAL = 10.0
"""Seconds between two lines about the engines' work."""


async def log_throughput(models: Models) -> None:
    """Logs a line for each model that did something, until it is cancelled."""
    while True:
        await asyncio.sleep(INTERVAL)
        for name, each in models.loaded().items():
            if line := each.server.throughput.line():
                throughput.info(f"{name}: {line}" if models.several else line)


class ThroughputLog:
    """Lines about what an engine did since the last one, as vLLM's."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.before = EngineStats()
        self.time = perf_counter()

    def line(self) -> str | None:
        """None: nothing happened, or no engine answers."""
        try:
            now = self.engine.snapshot()
        except ClosedError:
            return None
        stats = EngineStats()
        stats.include(now.stats)  # a copy: the engine goes on counting
        old, self.before = self.before, stats
        started, self.time = self.time, perf_counter()
        seconds = self.time - started
        tokens, read = stats.generated_tokens - old.generated_tokens, stats.prompt_tokens - old.prompt_tokens
        if not (now.running or now.waiting or tokens or read):
            return None
        result = [
            f"running: {now.running} requests, waiting: {now.waiting}",
            f"prompt throughput: {read / seconds:.1f} tokens/s, generation throughput: {tokens / seconds:.1f} tokens/s",
            f"KV cache usage: {now.usage:.1%}",
        ]
        if queries := stats.prefix_queries - old.prefix_queries:
            result.append(f"prefix cache hit rate: {(stats.prefix_hits - old.prefix_hits) / queries:.1%}")
        if drafts := stats.num_drafts - old.num_drafts:
            length = 1 + (stats.num_accepted_tokens - old.num_accepted_tokens) / drafts
            result.append(f"mean acceptance length: {length:.2f}")
            for name, counts in sorted(stats.by_drafter.items()):
                _, drafted, accepted = map(sub, counts, old.by_drafter.get(name, (0, 0, 0)))
                if drafted:
                    result.append(f"draft acceptance rate of {name}: {accepted / drafted:.1%} of {drafted} tokens")
        return ", ".join(result)


throughput = logging.getLogger("forerun.throughput")
log = logging.getLogger("forerun.requests")
LOGGED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill", "/api/chat", "/api/generate",
)  # fmt: skip


class RequestLog:
    """ASGI middleware. It sets ``state.request_id``, sends it as ``X-Request-Id``, and logs a line when the answer was
    sent, or its reader left. Routes leave their reply in ``state.reply``, and what they hold until then in
    ``state.resources``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = perf_counter()
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = uuid.uuid4().hex
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (
                    (b"x-request-id", b"request-id") if scope["path"].startswith("/v1/messages") else (b"x-request-id",)
                )
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in names)]
            await send(message)

        try:
            with ExitStack() as state["resources"]:
                await self.app(scope, receive, send_with_id)
        finally:
            reply = state.pop("reply", None)  # a connection keeps the state of its latest request
            if scope["path"] in LOGGED and log.isEnabledFor(logging.INFO):
                facts = {"status": status, **_facts(reply), "seconds": perf_counter() - start}
                text = " ".join(f"{key}={_format(value)}" for key, value in facts.items())
                log.info("%s %s %s id=%s", scope["method"], scope["path"], text, request_id)


def _facts(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {}
    usage, metrics = reply.usage(), reply.metrics()
    drafts = metrics.speculative_decoding
    return {
        "finish": reply.outcome,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "tokens_per_second": metrics.tokens_per_second,
        "mean_acceptance_length": drafts.mean_acceptance_length,
        "draft_acceptance_rate": drafts.draft_acceptance_rate,
    }


def _format(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
