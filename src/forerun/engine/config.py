"""Options of the engine and of speculation. The commands' flags are made from ``EngineConfig``'s fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from forerun.core.config import COUNT, POSITIVE_FRACTION, check_seed, check_types, check_within, option
from forerun.core.errors import ConfigError, shown
from forerun.core.threads import AUTO, check_threads
from forerun.engine.memory import parse_bytes
from forerun.models.kinds import CPU_KINDS, FLOATS, GPU_KINDS, UNQUANTIZED
from forerun.models.text.reasoning import PARSERS, check_parser
from forerun.speculate.names import drafters, policies, rules

if TYPE_CHECKING:
    from forerun.speculate.accept.base import Rule, RuleConfig
    from forerun.speculate.draft.base import DrafterConfig

NONE = "none"
METHODS = {"eagle3": "eagle"}
"""vLLM's names of methods that have another name here."""
LOOKUP_KEYS = {"prompt_lookup_max", "prompt_lookup_min"}
"""With one of these, vLLM's ``ngram`` is our ``prompt_lookup``."""
INSTEAD = {
    "speculative_token_tree": "'tree', children per node at each depth: [4, 2, 1]",
    "disable_by_batch_size": "'length': 'adaptive', which drafts as far as it pays at the present load",
    "rejection_sample_method": "'accept', the rule: 'token' is Leviathan et al.'s",
    "draft_sample_method": "'draft_temperature'",
    "parallel_drafting": "'method': 'parallel'",
    "draft_tensor_parallel_size": "remove it: rank 0 drafts alone",
    "disable_padded_drafter_batch": "remove it: batches are ragged",
    "revision": "the folder of that revision as 'model'",
}
"""What to use in place of vLLM's other keys."""
QUANTIZATION_HELP = (
    f"Quantize the target's weights. On CPU: {', '.join(CPU_KINDS)} (int8 is not invariant). On GPU: "
    f"{', '.join(GPU_KINDS)}. {', '.join(FLOATS)}: convert to this type. {UNQUANTIZED}: keep the checkpoint's format."
)


@dataclass(frozen=True)
class SpeculativeConfig:
    """A parsed ``speculative_config``: vLLM's keys, plus ``accept`` (a rule) and ``length`` (a policy). ``eagle3`` is
    ``eagle``, and ``ngram`` with vLLM's ``prompt_lookup_max`` or ``prompt_lookup_min`` is ``prompt_lookup``.

    Raises ConfigError for an unknown method, rule or policy, and for a key that belongs to another method.
    """

    method: str = NONE
    accept: str = "coupled"
    length: str = "fixed"
    drafter: DrafterConfig | None = None
    rule: RuleConfig | None = None
    """The rule's own options; None: its defaults."""
    synthetic: tuple[float, ...] | None = None
    """Probability that each position of a draft is accepted, in place of the rule; None: the rule decides."""

    def make_rule(self) -> Rule:
        """The acceptance rule."""
        from forerun.speculate.accept.synthetic import Synthetic

        rule = rules[self.accept](self.rule)
        return rule if self.synthetic is None else Synthetic(rule, self.synthetic)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig:
        """Parses the keys of a ``speculative_config``; None: plain decoding."""
        if options is None:
            return cls()
        if isinstance(options, SpeculativeConfig):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(f"speculative_config must be a mapping, 'auto' or None, not {shown(options)}")
        from forerun.speculate.accept.synthetic import KEYS as SYNTHETIC
        from forerun.speculate.accept.synthetic import take_rates

        remaining = dict(options)
        method = remaining.pop("method", None)
        method = METHODS.get(method, method) if isinstance(method, str) else method
        if method == "ngram" and LOOKUP_KEYS & set(remaining):
            method = "prompt_lookup"
        if remaining.get("draft_tensor_parallel_size") == 1:
            del remaining["draft_tensor_parallel_size"]
        for key in remaining:
            if key in INSTEAD:
                raise ConfigError(f"speculative_config has no key {key!r} here; instead: {INSTEAD[key]}")
        if method is None:
            if "model" not in remaining:
                raise ConfigError("speculative_config needs a 'method'")
            from forerun.engine.drafter_files import method_of

            method = method_of(str(remaining["model"]))
        accept = remaining.pop("accept", "coupled")
        rule = rules[accept]
        if method != NONE and not set(SYNTHETIC) & set(remaining):
            with_defaults = drafters[method].config_class.with_defaults(remaining)
            if "length" not in remaining and not rule.identity:
                with_defaults.pop("length", None)  # lengths that follow the clock would change tokens from run to run
            remaining = with_defaults
        length = remaining.pop("length", "fixed")
        _ = policies[length]  # raises for an unknown one
        synthetic = {key: remaining.pop(key) for key in SYNTHETIC if key in remaining}
        rule_config = rule.config_class(**{key: remaining.pop(key) for key in rule.options() if key in remaining})
        for key in remaining:
            owners = [name for name in rules.loadable() if key in rules[name].options()]
            if owners:
                raise ConfigError(
                    f"speculative_config: accept={accept!r} has no option {key!r}; it belongs to {', '.join(owners)}"
                )
        if method == NONE:
            if remaining or synthetic:
                raise ConfigError(
                    f"speculative_config: method 'none' has no option {sorted(remaining | synthetic)[0]!r}"
                )
            return cls(NONE, accept, length, rule=rule_config)
        config = drafters[method].config_class.from_dict(method, remaining)
        if config.branches and not rule.trees:
            raise ConfigError(
                f"accept={accept!r} supports chains only, but {method!r} drafts trees: choose another rule, or remove "
                "'tree' or 'tree_nodes' if they are set"
            )
        return cls(method, accept, length, config, rule_config, take_rates(synthetic, config.num_speculative_tokens))

    @classmethod
    def parse_all(
        cls,
        options: Mapping[str, Any] | SpeculativeConfig | Sequence[Mapping[str, Any] | SpeculativeConfig] | str | None,
    ) -> tuple[SpeculativeConfig, ...]:
        """Parses one config, or several whose drafters share an engine. Requests choose by method; the first is the
        default.

        Configs without a length policy take the others'. Raises ConfigError unless the methods differ and all share
        the rule and the length policy.
        """
        several = isinstance(options, Sequence) and not isinstance(options, str)
        items: Sequence[Any] = options if several else [options]  # type: ignore
        configs = tuple(cls.parse(item) for item in items)
        inherits = [isinstance(item, Mapping) and "length" not in item for item in items]
        lengths = [config.length for config, inherit in zip(configs, inherits) if not inherit]
        lengths += [config.length for config in configs if config.length != cls.length]
        if lengths:
            configs = tuple(replace(c, length=lengths[0]) if inherit else c for c, inherit in zip(configs, inherits))
        if not configs:
            return (cls(),)
        methods = [config.method for config in configs]
        if len(set(methods)) < len(methods):
            raise ConfigError(f"each method can be loaded once only: {', '.join(methods)}")
        for config in configs[1:]:
            for key in ("accept", "length", "rule", "synthetic"):
                if getattr(config, key) != getattr(configs[0], key):
                    raise ConfigError(
                        f"drafters of one engine share {key!r}: {getattr(configs[0], key)} for {methods[0]}, "
                        f"{getattr(config, key)} for {config.method}"
                    )
        return configs


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model.

    Every field is a keyword of ``LLM`` and a flag of the commands, except ``trace``, which HTTP requests choose. Where
    a command has a ``--seed`` of its own, that is the seed of its requests.
    """

    model: str = option(
        "forerun:target", "Checkpoint folder, GGUF file, hf:OWNER/NAME[:QUANTIZATION], or a name listed by forerun ls."
    )
    tokenizer: str | None = option(None, "Take the tokenizer from this checkpoint instead of the model's.")
    dtype: str = option("auto", "Data type: auto (the checkpoint's), float32, bfloat16 or float16.")
    device: str | None = option(None, "Device: cpu or cuda. Default: the GPU, if there is one.")
    invariant: bool | None = option(
        None,
        "Compute logits that are bit-equal with and without speculation. Default on CPU, and on GPU where possible.",
    )
    model_path: str = option("auto", "Model implementation: auto, native or hf (transformers).")
    weights: str = option("auto", "Weight layout: auto; streamed, packed or plain on CPU; triton or plain on GPU.")
    quantization: str | None = option(None, QUANTIZATION_HELP)
    tensor_parallel_size: int = option(1, "Number of processes that split each layer of the target.")
    lora: Sequence[str] | str | None = option(None, "LoRA adapter to merge into the target: FOLDER or FOLDER=WEIGHT.")
    max_model_len: int | None = option(None, "Maximum length of prompt plus output, in tokens. Default: the model's.")
    max_num_seqs: int = option(8, "Maximum number of requests decoded together.")
    max_num_batched_tokens: int = option(2048, "Maximum number of tokens per forward pass.")
    page_size: int | None = option(None, "Tokens per KV cache page. Default: one contiguous slot per request.")
    num_pages: int | None = option(None, "Pages of each KV cache. Default: enough for all requests.")
    kv_cache_memory: str | int | None = option(
        None, "Memory of all KV caches together, such as 2GiB. Default: enough for all requests, up to half of memory."
    )
    gpu_memory_utilization: float | None = option(
        None, "Fraction of GPU memory for weights and KV caches, above 0 and at most 1."
    )
    enforce_eager: bool = option(False, "Run without CUDA graphs on a GPU.")
    prefix_caching: bool | None = option(
        None, "Reuse the KV cache of shared prompt prefixes. Default with --page-size."
    )
    max_prefill_tokens: int | None = option(
        None, "Prompt tokens per step while others decode. Default: as long as a step stays under twice its usual time."
    )
    max_grammar_bytes: int = option(65536, "Maximum size of a schema, regex, choice list or grammar, in bytes.")
    grammar_memory: str | int = option("512MiB", "Memory for compiled grammars, such as 512MiB.")
    reasoning_parser: str | None = option(
        None, f"Reasoning format. Grammars start after the reasoning. One of {', '.join(PARSERS)}."
    )
    generation_config: str = option(
        "auto", "Sampling defaults: auto (the model's own, else neutral ones) or vllm (neutral ones)."
    )
    threads: str | int = AUTO
    """Threads of the CPU kernels; "auto": torch's, but at most one per core, and fewer while others need them."""
    memory: str | None = option(
        None, "Private file that keeps answers, from which later processes draft. For method suffix, alone or in auto."
    )
    memory_size: str | int = option("4MiB", "Size of --memory, 4 bytes per token. The oldest answers are dropped.")
    seed: int | None = option(None, "Seed of requests without one.")
    logprobs_mode: str = option(
        "raw_logprobs", "Log-probabilities to return: raw_logprobs (the model's) or processed_logprobs (as sampled)."
    )
    trace: bool = option(False, "Record every round of every request.")

    def __post_init__(self) -> None:
        check_within(self, {
            "max_num_seqs max_num_batched_tokens max_grammar_bytes tensor_parallel_size max_model_len page_size": COUNT,
            "num_pages max_prefill_tokens": COUNT, "gpu_memory_utilization": POSITIVE_FRACTION,
        })  # fmt: skip
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )
        if self.kv_cache_memory is not None and self.num_pages is not None:
            raise ConfigError("kv_cache_memory conflicts with num_pages: remove one")
        if self.gpu_memory_utilization is not None and (self.kv_cache_memory is not None or self.num_pages is not None):
            raise ConfigError("gpu_memory_utilization conflicts with kv_cache_memory and num_pages: remove one")
        if self.prefix_caching and self.page_size is None:
            raise ConfigError("prefix_caching needs page_size: set it to 16, for example")
        _ = self.kv_cache_bytes, self.grammar_bytes, self.memory_bytes
        if self.reasoning_parser is not None:
            check_parser(self.reasoning_parser)
        check_seed(self.seed)
        check_threads(self.threads)
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(f"generation_config must be auto or vllm, not {self.generation_config!r}")
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ConfigError(f"logprobs_mode must be raw_logprobs or processed_logprobs, not {self.logprobs_mode!r}")

    @property
    def kv_cache_bytes(self) -> int | None:
        return parse_bytes(self.kv_cache_memory) if self.kv_cache_memory is not None else None

    @property
    def grammar_bytes(self) -> int:
        return parse_bytes(self.grammar_memory, "grammar_memory")

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory_size, "memory_size")

    @property
    def caches_prefixes(self) -> bool:
        return self.page_size is not None and self.prefix_caching is not False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option {name!r}: choose one of {', '.join(sorted(known))}")
        check_types(cls, options)
        return cls(**options)
