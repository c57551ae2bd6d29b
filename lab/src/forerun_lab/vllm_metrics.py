"""``forerun serve --metrics-names vllm``: vLLM's names for our metrics, for gateways and dashboards that read them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import InfoMetricFamily
from prometheus_client.metrics_core import Metric

from forerun.serve.metrics import Collector

SHARED_WITH_VLLM = frozenset(
    (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
        "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    )
)  # fmt: skip
"""Metrics that vLLM has with the same name and meaning, under ``vllm:``."""


class VllmNames:
    """Repeats those of the metrics of ``own`` that vLLM has."""

    def __init__(self, own: Collector) -> None:
        self.own = own

    def collect(self) -> Iterator[Metric]:
        for family in self.own.collect():
            name = family.name.removeprefix("forerun:")
            if name in SHARED_WITH_VLLM:
                yield self._renamed(family, name)
        yield self._cache_config()

    def _renamed(self, own: Metric, name: str) -> Metric:
        family = Metric(f"vllm:{name}", own.documentation, own.type)
        for sample in own.samples:
            suffix = sample.name.removeprefix(own.name)
            family.add_sample(family.name + suffix, {"engine": "0", **sample.labels}, sample.value)
        return family

    def _cache_config(self) -> Metric:
        family = InfoMetricFamily("vllm:cache_config", "the KV cache: tokens in a page, pages", labels=[])
        for index, engine in enumerate(list(self.own.engines.values())):
            now = engine.snapshot()
            family.add_metric([], {
                "block_size": str(now.page_size), "num_gpu_blocks": str(now.pages), "cache_dtype": "auto",
                "enable_prefix_caching": str(now.caches_prefixes), "engine": str(index),
            })  # fmt: skip
        return family
