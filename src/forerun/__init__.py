"""Forerun: lossless speculative decoding. The same tokens, sooner.

A name is imported when it is first used: importing the package costs nothing.
"""

import importlib.util
import typing

if typing.TYPE_CHECKING:
    from forerun.core.errors import ConfigError, ForerunError, ModelError, RequestError
    from forerun.core.request import RequestState
    from forerun.core.tree import Draft, Verdict
    from forerun.engine.async_llm import AsyncLLM
    from forerun.engine.beams import BeamSearchOutput, BeamSearchSequence
    from forerun.engine.config import EngineConfig, SpeculativeConfig
    from forerun.engine.jobs import Logprob
    from forerun.engine.llm import LLM
    from forerun.engine.metrics import RequestMetrics
    from forerun.engine.outputs import CompletionOutput, RequestOutput, StreamPiece
    from forerun.sampling.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
    from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs
    from forerun.speculate.names import drafters

__version__ = "0.2.0"

_NAMES = {
    "core.errors": "ConfigError ForerunError ModelError RequestError",
    "core.request": "RequestState",
    "core.tree": "Draft Verdict",
    "engine.async_llm": "AsyncLLM",
    "engine.beams": "BeamSearchOutput BeamSearchSequence",
    "engine.config": "EngineConfig SpeculativeConfig",
    "engine.jobs": "Logprob",
    "engine.llm": "LLM",
    "engine.metrics": "RequestMetrics",
    "engine.outputs": "CompletionOutput RequestOutput StreamPiece",
    "sampling.params": "BeamSearchParams SamplingParams StructuredOutputsParams",
    "speculate.draft.base": "DraftContext Drafter DrafterConfig Needs",
    "speculate.names": "drafters",
}
"""Public names by module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "DraftContext",
    "Drafter",
    "DrafterConfig",
    "EngineConfig",
    "ForerunError",
    "Logprob",
    "ModelError",
    "Needs",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestState",
    "SamplingParams",
    "SpeculativeConfig",
    "StreamPiece",
    "StructuredOutputsParams",
    "Verdict",
    "__version__",
    "drafters",
]


def __getattr__(name: str) -> typing.Any:
    """A public name, or a module of the package such as ``forerun.pretrained``."""
    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
