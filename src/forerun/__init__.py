"""Forerun: lossless speculative decoding. The same tokens, sooner."""

from forerun.core.errors import ConfigError, ForerunError, ModelError, NumericsError, RequestError
from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.llm import LLM, CompletionOutput, RequestOutput
from forerun.engine.metrics import RequestMetrics
from forerun.sampling.params import SamplingParams, StructuredOutputsParams
from forerun.speculate.draft import DraftContext, Drafter, DrafterConfig, Needs, drafters

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "DraftContext",
    "Drafter",
    "DrafterConfig",
    "EngineConfig",
    "ForerunError",
    "ModelError",
    "Needs",
    "NumericsError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "Verdict",
    "__version__",
    "drafters",
]
