"""Every format of calls by name."""

from forerun.serve.tools import formats

FORMATS = [formats[name]() for name in formats]
GEMMA, HARMONY, HERMES, LFM2, LLAMA, MISTRAL, MISTRAL_LIST, PYTHONIC, QWEN = FORMATS
