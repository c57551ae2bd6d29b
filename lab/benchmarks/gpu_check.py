"""The engine on a GPU in four minutes: ``python gpu_check.py [--interpret] [PART ...]``.

PARTS, each in a process of its own with its own time limit: ``bits`` (the self-test of rows, in chains and trees),
``identity`` (drafted tokens against plain ones), ``linears`` (the fastest tiles, and the kernel of matrices against
cuBLAS), ``speed`` and ``drafts`` (Llama-3.2-1B's shape in bfloat16, plain and with adaptive drafts of synthetic
acceptance), ``chains`` (four tokens of draft_model, eagle and dflash: how often the host waits in a round, and the step
that is a graph against a step at a time).
Every line has what was found and what is expected, and is printed as it is found; the last one counts those that agree.
No GPU has run linears, sampling, graphs and chains in Triton yet, nor verified drafts that the host has not read: the
first two parts do all of that, and what follows needs them.

``--interpret`` runs ``bits`` and ``identity`` on tiny models under Triton's interpreter, on any machine.
"""

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from pathlib import Path

INTERPRET = "--interpret" in sys.argv
if INTERPRET:
    os.environ.update(FORERUN_INTERPRET="1", TRITON_INTERPRET="1")

import torch  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from forerun import LLM, SamplingParams  # noqa: E402
from forerun.core.batch import Batch, Span  # noqa: E402
from forerun.kernels.gpu import HostCopy  # noqa: E402
from forerun.models.load import load_model  # noqa: E402
from forerun.models.run.base import new_attention  # noqa: E402
from forerun.models.run.invariance import self_test  # noqa: E402
from forerun.speculate.draft import drafters  # noqa: E402
from forerun.speculate.draft.heads.head import Sizes  # noqa: E402

DEVICE = "cpu" if INTERPRET else "cuda"
DTYPES = ("bfloat16",) if INTERPRET else ("bfloat16", "float32")  # tests run the interpreter in float32
LIMITS = {"bits": 35, "identity": 50, "linears": 40, "speed": 50, "drafts": 30, "chains": 35}
"""Seconds of each part on a GPU."""
RATES = [0.8, 0.65, 0.5, 0.4]
"""Synthetic acceptance of four drafted tokens."""
BANDWIDTH = 3.35e12
"""An H100's, in bytes a second."""
TOGETHER = (
    [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.1, "top_k": 40, "min_p": 0.02}],
    [{"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {5: 2.0, 6: -100.0}}],
)
"""Options of requests that run side by side: those that need no host, and one that does."""
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 100}  # fmt: skip
SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip
LARGE = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
HEAD = {**LARGE, "num_hidden_layers": 1}
SHAPES = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048))


def report(part, what, found, expected, good):
    print(f"{part}: {what}: {found} (expected {expected})", "" if good else "NOT AS EXPECTED", flush=True)
    print("COUNT", json.dumps(bool(good)), flush=True)


def saved(place, name, sizes, spread=0.02, **options):
    """A random model's folder; it is made once."""
    folder = Path(place) / name
    if not folder.exists():
        config = LlamaConfig(**{**sizes, **options}, max_position_embeddings=2048, tie_word_embeddings=True,
                             bos_token_id=None, eos_token_id=0, initializer_range=spread)  # fmt: skip
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = LlamaForCausalLM(config).to(torch.float32 if sizes in (TINY, SMALL) else torch.bfloat16)
        model.save_pretrained(folder)
        words = {"<eos>": 0, **{f"w{i}": i for i in range(1, sizes["vocab_size"])}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def prompts(count, length, size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, size, (length + i,), generator=generator).tolist() for i in range(count)]


def bits(place):
    target = saved(place, "bits", TINY if INTERPRET else SMALL, 0.3 if INTERPRET else 0.08)
    for dtype in DTYPES:
        model = load_model(target, device=DEVICE, dtype=dtype, invariant=None)
        report("bits", f"{dtype} invariant", model.invariant, True, model.invariant)
        options = {"rows": 4, "chunks": (3,)} if INTERPRET else {"rows": 100}
        found = self_test(model, page_size=16, **options)
        text = "; ".join(map(str, found)) or "every row as decoded"
        report("bits", f"{dtype} chains and trees", text, "every row as decoded", not found)


def head(place, method, sizes):
    """A random head with layers of the target's shape: of EAGLE-3, or a block of ``dflash``."""
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    options = {"heads": heads, "kv_heads": kv_heads, "width": sizes["hidden_size"] // heads,
               "inner_size": sizes["intermediate_size"]}  # fmt: skip
    folder = Path(place) / f"{method} {sizes['hidden_size']}"
    made_for = Sizes(sizes["hidden_size"], sizes["vocab_size"], sizes["num_hidden_layers"], 5, options)
    drafters[method].head_class.example(made_for).save(folder)
    return {"method": method, "model": str(folder)}


def mtp(place, target):
    """A random layer for multi-token prediction."""
    folder = Path(place) / "mtp"
    folder.mkdir(exist_ok=True)
    return {"method": "mtp", **drafters["mtp"].example(Path(target), folder)}


def answers(target, dtype, way):
    """What several requests get, in a process of its own."""
    size, count, options = (100, 1, {"max_tokens": 4}) if INTERPRET else (4096, 4, {"max_tokens": 40})
    options.update(seed=7, ignore_eos=True)
    asked = [
        [(prompt, SamplingParams(**each, **options)) for each in together for prompt in prompts(count, 8, size)]
        for together in TOGETHER
    ]
    limits = {"page_size": 16, "max_model_len": 256, "kv_cache_memory": "1GiB"}  # several share the GPU
    llm = LLM(target, device=DEVICE, dtype=dtype, speculative_config=way, **limits)
    out = [each for pairs in asked for each in llm.generate(*map(list, zip(*pairs)), use_tqdm=False)]
    llm.close()
    return [list(each.outputs[0].token_ids) for each in out]


def identity(place):
    sizes = TINY if INTERPRET else SMALL
    target = saved(place, "bits", sizes, 0.3 if INTERPRET else 0.08)
    ways = [None, {"method": "draft_model", "model": target, "num_speculative_tokens": 2}, head(place, "eagle", sizes),
            mtp(place, target), head(place, "dflash", sizes),
            {"method": "draft_model", "model": target, "tree": [2, 1]}]  # fmt: skip
    ways += [] if INTERPRET else [{"method": "suffix"}, {"method": "ngram"}]
    plain, asked = {}, [(target, dtype, way) for dtype in DTYPES for way in ways]
    # Side by side, since Triton compiles for most of the time.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(asked)), get_context("spawn")) as pool:
        for (_, dtype, way), found in zip(asked, pool.map(answers, *zip(*asked))):
            same = sum(map(list.__eq__, plain.setdefault(dtype, found), found))
            name = "plain" if way is None else way["method"] + (" as a tree" if "tree" in way else "")
            report("identity", f"{dtype} {name}", f"{same} of {len(found)}", "all", same == len(found))


def milliseconds(run, count=30):
    """The median of three, by CUDA's clock."""
    times = []
    run()
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / count)
    return sorted(times)[1]


def captured(run):
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cublas(weight):
    return lambda x: torch.nn.functional.linear(x, weight)


def time_of(layers, x):
    """Milliseconds of each of several layers, in one graph."""
    return milliseconds(captured(lambda: [layer(x) for layer in layers]), 5) / len(layers)


def linears(place):
    from forerun.models.formats import triton as ours

    for outputs, inputs in SHAPES:
        copies = max(1, int(2e8 / (2 * outputs * inputs)))  # more than caches hold
        weights = [torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        few = ours.quantized(weights[0][:64], None, name="q4_0").weight  # all of them would take seconds
        more = {"outputs": outputs, "levels": few.levels.repeat(1, outputs // 64, 1),
                "scales": few.scales.repeat(1, outputs // 64)}  # fmt: skip
        four = ours.TritonLinear(dataclasses.replace(few, **more), None, torch.bfloat16)
        ways = {
            "ours": [ours.make(weight, None) for weight in weights],
            "cublas": [cublas(weight) for weight in weights],
            "q4_0": [copy.deepcopy(four) for _ in range(3 * copies)],
        }
        began, first = time.monotonic(), ways["ours"][0].tile
        ours.autotune(ways["ours"], torch.cuda.get_device_name())
        tile, took = ways["ours"][0].tile, time.monotonic() - began
        report("linears", f"{outputs} x {inputs}, tile", f"{tile} in {took:.0f} s", f"{first} or faster", True)
        found = {}
        for rows in (1, 5, 16, 512):
            x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
            found.update({(way, rows): time_of(layers, x) for way, layers in ways.items()})
        read = 2e-9 * outputs * inputs / found["ours", 1]
        text = ", ".join(f"{way} {rows} {1e3 * each:.1f}" for (way, rows), each in found.items())
        good = found["ours", 5] <= 1.08 * found["ours", 1]
        aim = "5 rows at most 1.08 of one"
        report("linears", f"{outputs} x {inputs}", f"{read:.2f} TB/s; us by rows: {text}", aim, good)
        share = found["q4_0", 1] / found["ours", 1]
        report("linears", f"{outputs} x {inputs}, 4 bits", f"{share:.2f} of bfloat16", "at most 0.5", share <= 0.5)


def throughput(llm, streams, new=96):
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    times = []
    for _ in range(3):
        began = time.monotonic()
        llm.generate(prompts(streams, 64, 4096), params, use_tqdm=False)
        times.append(time.monotonic() - began)
    return streams * new / min(times)


def speed(place):
    llm = LLM(saved(place, "large", LARGE), device=DEVICE, speculative_config=None, max_num_seqs=64, max_model_len=512)
    size = llm.model.info.weight_bytes
    for streams, least in ((1, 0.55 * BANDWIDTH / size), (16, None), (64, 15000)):
        rate = throughput(llm, streams)
        Path(place, f"plain {streams}").write_text(str(rate))
        aim = "no less than before" if least is None else f"at least {least:.0f}"
        report("speed", f"plain, {streams} streams", f"{rate:.0f} tokens/s", aim, least is None or rate >= least)
    model, attention = llm.model, new_attention(llm.model, max_seqs=1, max_len=600)
    model.forward(Batch([Span(0, 0, list(range(3, 515)))], DEVICE), attention)

    def round_of(rows):
        attention.pool.truncate(0, 512)
        return model.forward(Batch([Span(0, 512, [7] * rows, logits=list(range(rows)))], DEVICE), attention)

    with torch.inference_mode():
        times = {rows: milliseconds(lambda rows=rows: round_of(rows)) for rows in (1, 5, 16)}
    for rows, most in ((5, 1.08), (16, 1.15)):
        share = times[rows] / times[1]
        found = f"{share:.2f} of one ({times[1]:.2f} ms)"
        report("speed", f"{rows} rows of a forward", found, f"at most {most}", share <= most)


def synthetic(place, method):
    """Four drafted tokens a round, of synthetic acceptance."""
    own = {"method": method, "model": saved(place, "head", HEAD)} if method == "draft_model" else None
    return {**(own or head(place, method, LARGE)), "num_speculative_tokens": 4, "synthetic_acceptance_rates": RATES}


def drafts(place):
    way = {**synthetic(place, "draft_model"), "length": "adaptive"}
    llm = LLM(saved(place, "large", LARGE), device=DEVICE, speculative_config=way, max_num_seqs=64, max_model_len=512)
    for streams in (1, 16, 64):
        rate, kept = throughput(llm, streams), Path(place, f"plain {streams}")
        plain = float(kept.read_text()) if kept.exists() else 0.0
        report("drafts", f"{streams} streams", f"{rate:.0f} tokens/s", f"at least {0.98 * plain:.0f}, 0.98 of plain",
               rate >= 0.98 * plain)  # fmt: skip


def one_stream(llm, new=128):
    """Tokens a second and seconds a round of one request, the best of three; and its drafted and accepted tokens."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=new, ignore_eos=True)
    best = None
    for _ in range(4):  # the first one captures
        began = time.monotonic()
        (out,) = llm.generate(prompts(1, 64, 4096), params, use_tqdm=False)
        took, metrics = time.monotonic() - began, out.metrics
        best = min(best or inf, took)
    counts = metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
    return new / best, best / metrics.rounds, counts


def waits(llm):
    """How often the host waits in each round that drafts: calls that torch says wait, and copies that are not there
    when they are read."""
    read, late, counts = HostCopy.read, [], []

    def counted(copy):
        late.extend([copy] if not copy._copied.query() else [])
        return read(copy)

    def see(result):
        counts.extend([len(late) + len(said)] if any(map(len, result.drafts)) else [])
        late.clear()
        said.clear()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        HostCopy.read, llm.engine.on_round = counted, see
        torch.cuda.set_sync_debug_mode("warn")
        llm.generate(prompts(1, 64, 4096), SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True),
                     use_tqdm=False)  # fmt: skip
        torch.cuda.set_sync_debug_mode("default")
        HostCopy.read, llm.engine.on_round = read, None
    return counts


def chains(place):
    target, common = saved(place, "large", LARGE), {"device": DEVICE, "max_num_seqs": 8, "max_model_len": 512}
    llm = LLM(target, speculative_config=None, **common)
    plain, token, _ = one_stream(llm)
    report("chains", "plain", f"{plain:.0f} tokens/s", "a number", True)
    llm.close()
    for method in ("draft_model", "eagle", "dflash"):
        llm = LLM(target, speculative_config={**synthetic(place, method), "length": "fixed"}, **common)
        (drafter,) = llm.engine.router.drafters.values()
        rate, took, counts = one_stream(llm)
        found = f"{rate:.0f} tokens/s, a round {took / token:.2f} of a plain one"
        report("chains", method, found, "a round at most 1.35", took <= 1.35 * token)
        found = sorted(waits(llm))
        report("chains", f"{method}, waits of a round", found, "mostly 2: synthetic acceptance chooses twice",
               found[len(found) // 2] == 2)  # fmt: skip
        if method != "dflash":
            if drafter.chains is None:
                report("chains", method, "no graph of a step", "one", False)
            drafter.chains = None
            slower, _, others = one_stream(llm)
            found = f"{slower:.0f} tokens/s, drafted and accepted {others}"
            report("chains", f"{method}, a step at a time", found, f"at most {rate:.0f}, {counts}",
                   slower <= rate and counts == others)  # fmt: skip
        llm.close()


def main():
    parts = [each for each in sys.argv[1:] if not each.startswith("--")]
    if "--in" in sys.argv[1:2]:  # a part, in a process of its own
        place, part = parts
        globals()[part](place)
        return 0
    unknown = {*parts} - {*LIMITS} or ({*parts} - {"bits", "identity"} if INTERPRET else set())
    if unknown:
        print(f"gpu_check.py has no part {', '.join(sorted(unknown))} here; there are {', '.join(LIMITS)}")
        return 1
    if not INTERPRET and not torch.cuda.is_available():
        print("there is no GPU that torch can use: --interpret runs bits and identity without one")
        return 1
    print(torch.__version__, "interpreted" if INTERPRET else torch.cuda.get_device_name(), flush=True)
    good = bad = 0
    with tempfile.TemporaryDirectory() as place:
        for part in parts or (["bits", "identity"] if INTERPRET else LIMITS):
            command = [sys.executable, __file__, "--in", *(["--interpret"] if INTERPRET else []), place, part]
            began, limit, results = time.monotonic(), 900 if INTERPRET else LIMITS[part], []
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
                end = threading.Timer(limit, os.killpg, (run.pid, signal.SIGKILL))  # and what it started
                end.start()
                for line in run.stdout:
                    if line.startswith("COUNT"):
                        results.append(json.loads(line.removeprefix("COUNT ")))
                    else:
                        print(line, end="", flush=True)
            late = end.finished.is_set()
            end.cancel()
            failed = f"not done after {limit} s" if late else f"exit code {run.returncode}" if run.returncode else None
            good, bad = good + sum(results), bad + len(results) - sum(results) + (failed is not None)
            print(f"{part} took {time.monotonic() - began:.0f} s", failed or "", flush=True)
    print(f"{good} as expected, {bad} not")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
