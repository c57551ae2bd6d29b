"""Prometheus metrics, held against what answers say of themselves."""

import itertools
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import run_server, until

from forerun import ConfigError
from forerun.serve.app import ServerOptions
from forerun.serve.metrics import ThroughputLog
from refusals import refused

PROMPT = "def parse("


def read(server):
    """Values by name and label."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels.pop("model_name") for sample in samples if "model_name" in sample.labels} == {"tiny"}
    return {(s.name.removeprefix("forerun:"), next(iter(s.labels.values()), None)): s.value for s in samples}


def test_prometheus_metrics(client, server):
    before = read(server)
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24)
    after = read(server)
    speculation = answer.metrics["speculative_decoding"]

    def grown(name, label=None):
        return after[name, label] - before.get((name, label), 0.0)

    assert grown("spec_decode_num_drafts_total") == speculation["num_spec_steps"]
    assert grown("spec_decode_num_draft_tokens_total") == speculation["num_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == speculation["num_accepted_draft_tokens"]
    first = sum(accepted >= 1 for accepted in speculation["per_step_accepted"])
    assert grown("spec_decode_num_accepted_tokens_per_pos_total", "0") == first
    assert grown("generation_tokens_total") == 24
    assert grown("request_success_total", "length") == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") > 0
    for phase in ("draft", "verify", "accept", "host"):
        assert grown("round_seconds_total", phase) > 0
    assert after["num_requests_running", None] == 0


def test_drafters_are_counted_apart(server):
    before = read(server)
    answer = server.post("/v1/completions", {"prompt": PROMPT, "seed": 7, "max_tokens": 24}).json()
    after = read(server)
    said = answer["metrics"]["speculative_decoding"]
    assert said["num_draft_tokens"] > 0
    for name, key in (
        ("drafts", "num_spec_steps"), ("draft_tokens", "num_draft_tokens"),
        ("accepted_tokens", "num_accepted_draft_tokens"),
    ):  # fmt: skip
        name = f"spec_decode_num_{name}_by_drafter_total", said["method"]
        assert after[name] - before.get(name, 0) == said[key]


def test_the_log_says_what_ten_seconds_brought(server, monkeypatch):
    log, times = ThroughputLog(server.engine), itertools.count(0, 10)

    def line():
        with monkeypatch.context() as patch:
            patch.setattr("forerun.serve.metrics.perf_counter", times.__next__)
            return log.line()

    line()
    assert line() is None  # nothing happened
    prompt = [*range(21, 41)]
    answer = server.post("/v1/completions", {"prompt": prompt, "seed": 7, "max_tokens": 24, "temperature": 0}).json()
    said = answer["metrics"]["speculative_decoding"]
    accepted, drafted = said["num_accepted_draft_tokens"], said["num_draft_tokens"]
    assert line() == (
        "running: 0 requests, waiting: 0, prompt throughput: 2.0 tokens/s, generation throughput: 2.4 tokens/s, "
        "KV cache usage: 0.0%, prefix cache hit rate: 0.0%, mean acceptance length: "
        f"{said['mean_acceptance_length']:.2f}, draft acceptance rate of {said['method']}: {accepted / drafted:.1%} of "
        f"{drafted} tokens"
    )
    assert line() is None


def test_what_prefixes_saved(server):
    prompt = [11, 12, 13, 14] * 10
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    before = read(server)
    answer = server.post("/v1/completions", {"prompt": [*prompt, 15], "max_tokens": 1}).json()
    after = read(server)
    hits, queries = "prefix_cache_hits_total", "prefix_cache_queries_total"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32  # whole pages
    assert after[hits, None] - before[hits, None] == 32
    assert after[queries, None] - before[queries, None] == 41
    assert after["prefix_cache_hit_rate", None] == pytest.approx(after[hits, None] / after[queries, None])


def test_acceptance_by_the_length_of_the_text(server):
    """Every round counts for the text it drafted for, as the request's trace tells it."""
    before = read(server)
    expected = defaultdict(int)
    for length in (60, 120, 300):
        body = {"prompt": [5] * length, "max_tokens": 24, "seed": 1, "speculative": {"trace": True}}
        answer = server.post("/v1/completions", body).json()
        known = length
        for round_ in answer["choices"][0]["trace"]:
            bound = next(str(bound) for bound in (64, 128, 256, 512) if known <= bound)
            if round_["drafted"]:
                expected["num_drafts", bound] += 1
                expected["num_draft_tokens", bound] += round_["drafted"]
                accepted = sum(origin == "accepted" for _, origin in round_["tokens"])
                expected["num_accepted_tokens", bound] += accepted
            known += len(round_["tokens"])
    after = read(server)
    assert {bound for _, bound in expected} == {"64", "128", "256", "512"}
    for (name, bound), count in expected.items():
        key = (f"spec_decode_{name}_by_context_total", bound)
        assert after[key] - before.get(key, 0.0) == count, (name, bound)


def grown(server, before, reason):
    """Wait until so many more answers ended for ``reason``."""
    key = "request_success_total", reason
    return lambda count: until(lambda: read(server)[key] - before[key] == count)


@pytest.mark.usefixtures("slow_rounds")
def test_requests_that_are_left_or_late_are_counted(served):
    options = ServerOptions(served_model_name="tiny", request_timeout=0.5)
    with run_server(served, options) as running:
        before = read(running)
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "n": 2}
        with running.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            next(iter(stream.iter_lines()))
        grown(running, before, "abort")(2)
        assert running.post("/v1/completions", body).status_code == 504
        grown(running, before, "error")(2)
        assert running.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200
        assert running.post("/v1/completions", {**body, "max_tokens": 1000}).status_code == 400
        grown(running, before, "length")(2)
        grown(running, before, "abort")(2)


def test_refused_requests_have_no_answers_that_end(server):
    before = read(server)
    for wrong in ({"prompt": [99999]}, {"prompt": PROMPT, "logit_bias": {"99999": 1}}, {"prompt": [5] * 600}):
        assert server.post("/v1/completions", {**wrong, "n": 3}).status_code == 400
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}).status_code == 200
    after = read(server)
    ended = {
        label: after[name, label] - before[name, label] for name, label in after if name == "request_success_total"
    }
    assert ended == {"stop": 0, "length": 1, "error": 0, "abort": 0}


GATEWAY = {
    "vllm:num_requests_waiting": "gauge", "vllm:num_requests_running": "gauge", "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge", "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter", "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
}  # fmt: skip
"""Names and types in vLLM's documentation that routers and dashboards read."""


def test_what_gateways_read(served, server):
    assert "vllm:" not in server.http.get("/metrics").text
    with run_server(served, ServerOptions(served_model_name="tiny", metrics_names="vllm")) as running:
        running.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "seed": 7})
        text = running.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: families[name].type for name in GATEWAY} == GATEWAY
    for name in GATEWAY:
        own = families.get(name.replace("vllm:", "forerun:"))
        for sample in families[name].samples:
            assert sample.labels["engine"] == "0"
            if own is not None:
                assert sample.labels["model_name"] == "tiny"
                twin = {key: value for key, value in sample.labels.items() if key != "engine"}
                assert [each.value for each in own.samples if each.labels == twin] == [sample.value]
    (facts,) = families["vllm:cache_config_info"].samples
    pool = served.engine.target.attention.pool
    assert facts.value == 1.0
    assert (facts.labels["block_size"], facts.labels["num_gpu_blocks"]) == (str(pool.page_size), str(pool.num_pages))


def test_unknown_names_are_refused():
    refused(ConfigError, "metrics_names is forerun or vllm, not 'sglang'", ServerOptions, metrics_names="sglang")
