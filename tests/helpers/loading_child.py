"""Loads models, each in a process forked for it, and prints what that did to its resident memory, in bytes: ``peak``
and ``stays`` beyond what there was before, and ``weights``, what the model says that it holds."""

import json
import os
import tempfile
from pathlib import Path

import torch

from forerun.models.load import load_model
from tiny import save_tokenizer, tiny_llama


def memory(name):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def measure(tiny, path, options):
    load_model(tiny, invariant=False, **options)  # libraries and kernels come in with the first model
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget what the peak was before
    before = memory("VmRSS")
    model = load_model(path, invariant=False, **options)
    result = {"peak": memory("VmHWM") - before, "stays": memory("VmRSS") - before, "weights": model.info.weight_bytes}
    print(json.dumps(result), flush=True)


def main(cases):
    """``cases``: paths and options."""
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    with tempfile.TemporaryDirectory() as tiny:
        tiny_llama().save_pretrained(tiny)
        save_tokenizer(Path(tiny))
        for case in cases:
            child = os.fork()
            if not child:
                measure(tiny, *case)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"{case} could not be measured")
