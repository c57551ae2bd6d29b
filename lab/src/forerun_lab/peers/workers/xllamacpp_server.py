"""llama.cpp's server from the wheel ``xllamacpp``, with those options of ``llama-server`` that a peer needs:
``INTERPRETER xllamacpp_server.py -m FILE --port PORT [-md FILE] [--spec-type draft-simple|ngram-simple|...]``.
A program for ``--peers llama-server=PROGRAM`` is this file behind a first line that names the interpreter:

    (echo "#!$PWD/xllama/bin/python"; cat xllamacpp_server.py) > llama-server && chmod +x llama-server
"""

import argparse
import signal

import xllamacpp as llama

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--version", action="version", version=f"version: {llama.__version__}")
parser.add_argument("-m", "--model", required=True)
parser.add_argument("-md", "--model-draft")
parser.add_argument("-c", "--ctx-size", type=int, default=4096)
parser.add_argument("-np", "--parallel", type=int, default=1)
parser.add_argument("-t", "--threads", type=int, default=2)
parser.add_argument("-tb", "--threads-batch", type=int, default=2)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--spec-type", default=None)
parser.add_argument("--draft-max", type=int, default=None)
parser.add_argument("--cache-reuse", type=int, default=0)
given = parser.parse_args()

params = llama.CommonParams()
params.model.path = given.model
params.hostnames, params.port = [given.host], given.port
params.n_ctx, params.n_parallel = given.ctx_size, given.parallel
params.cpuparams.n_threads, params.cpuparams_batch.n_threads = given.threads, given.threads_batch
params.n_cache_reuse = given.cache_reuse
kind = given.spec_type or ("draft-simple" if given.model_draft else "none")
name = "COMMON_SPECULATIVE_TYPE_" + kind.upper().replace("-", "_")
params.speculative.types = [getattr(llama.common_speculative_type, name)]
draft = params.speculative.draft
if given.model_draft:
    draft.mparams.path = given.model_draft
    draft.cpuparams.n_threads, draft.cpuparams_batch.n_threads = given.threads, given.threads_batch
if given.draft_max is not None:
    draft.n_max = given.draft_max
server = llama.Server(params)
print(f"listening on {server.listening_address}", flush=True)
signal.sigwait([signal.SIGTERM, signal.SIGINT])
