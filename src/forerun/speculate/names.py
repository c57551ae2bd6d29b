"""The registries of drafters, acceptance rules and length policies: every name that there is, and nothing imported yet.

A class is imported when its name is looked up, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.core.registry import Registry

if TYPE_CHECKING:
    from forerun.speculate.accept.base import Rule
    from forerun.speculate.draft.base import Drafter
    from forerun.speculate.length.base import LengthPolicy

DRAFT_MODEL = (
    "prefill_chunk draft_window tree_nodes confidence_threshold model dtype quantization max_model_len "
    "draft_vocab_size prompt_lookup_num_tokens use_heterogeneous_vocab heterogeneous_vocab_method"
)
SHARED_KEYS = "num_speculative_tokens tree draft_temperature"
"""The keys of ``speculative_config`` that every drafter has."""
KEYS = {
    "cascade": "drafters min_confidence",
    "dflash": "model adapt tree_nodes confidence_threshold quantization prefill_chunk draft_window",
    "draft_model": DRAFT_MODEL,
    "eagle": "prefill_chunk draft_window model adapt tree_nodes confidence_threshold quantization",
    "merged": "drafters",
    "mtp": "prefill_chunk draft_window model adapt tree_nodes confidence_threshold quantization draft_vocab_size",
    "ngram": "max_order max_history counts_as_q",
    "pattern": "",
    "prompt_lookup": "prompt_lookup_max prompt_lookup_min",
    "suffix": (
        "tree_nodes suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_cached_tokens suffix_decoding_max_spec_factor suffix_decoding_min_token_prob datastore "
        "second_choices"
    ),
}
"""Our own drafters and the fields of their config classes beside the shared ones, as ``--help`` lists them."""
LAB_KEYS = {
    "blockwise": "model adapt tree_nodes quantization",
    "layerskip": "tree_nodes confidence_threshold exit_layer layers exit_head",
    "lookahead": "model adapt tree_nodes quantization",
    "medusa": "model adapt tree_nodes quantization",
    "parallel": "model adapt tree_nodes quantization",
    "random": "",
    "staged": f"{DRAFT_MODEL} drafter",
    "table": "table_file table_order adapt adapt_weight adapt_save",
    "token_recycling": "tree_nodes recycled_candidates",
}
"""The same of the drafters of forerun-lab."""

PROFILES = {"humaneval": (0.837, 0.685, 0.562, 0.460, 0.368, 0.283, 0.217, 0.161), "chat": (0.630, 0.389, 0.243, 0.158)}
"""Acceptance by position published for Llama-3.2-1B, unconditional as in vLLM: profiles of synthetic acceptance."""

drafters: Registry[Drafter[Any]] = Registry("method", "forerun.drafters", "forerun.speculate.draft", KEYS, LAB_KEYS)
rules: Registry[Rule] = Registry(
    "acceptance rule",
    "forerun.rules",
    "forerun.speculate.accept",
    ("block", "coupled", "lenient", "recursive", "token", "traversal"),
)
policies: Registry[LengthPolicy] = Registry(
    "length policy", "forerun.policies", "forerun.speculate.length", ("adaptive", "fixed"), ("planned",)
)
