"""The kernels' structs as arrays of int64, a number per field.

``structs.h`` names the same fields in the same order and says what they mean; ``library`` compares the names. Pointers
are addresses, 0 for null; doubles go through ``number``. Some structs are followed by others in memory: a
``LayerStruct`` by the ``LinearStruct`` of qkv, out, mixer_in, mixer_out, gate_up, down, per_layer_gate and
per_layer_out; an ``ExpertsStruct`` by the router's; a ``LatentStruct`` by that of q_b; a ``ModelStruct`` by those of
head, token_embd, fc, per_layer_rows and per_layer_project.
"""

from __future__ import annotations

import struct
from array import array
from collections import namedtuple
from typing import Any

SpanStruct = namedtuple("SpanStruct", "first rows base before table paths")
Plan = namedtuple("Plan", "spans num_spans tables num_tables paths num_paths entries num_entries")
PoolStruct = namedtuple(
    "PoolStruct",
    "pages page_size kv_heads width value_width key_page key_head key_slot value_page value_head value_slot",
)
Heads = namedtuple("Heads", "heads window sink_tokens q_stride k_stride v_stride bias reach sinks")
LinearStruct = namedtuple("LinearStruct", "kind weight bias scales offsets outputs inputs next")
ExpertsStruct = namedtuple(
    "ExpertsStruct",
    "size first num_local top_k normalize sigmoid score_bias scaling_factor eps groups top_groups group_top_k "
    "activation gated activation_params layers scales",
)
LatentStruct = namedtuple(
    "LatentStruct", "kv_lora_rank q_lora_rank nope_dim rope_dim v_dim q_a_norm kv_a_norm eps k_b v_b"
)
MixerStruct = namedtuple(
    "MixerStruct",
    "kind channels columns d_inner gates heads groups key_dim value_dim tiled conv bias ssm_a dt_bias ssm_d norm eps",
)
RunStruct = namedtuple("RunStruct", "slot first nodes checkpoint")
ReplayStruct = namedtuple(
    "ReplayStruct",
    "runs num_runs nodes parents rows copies taps columns read num_read written written_rows num_written slots records",
)
LayerStruct = namedtuple(
    "LayerStruct",
    "norm_attention norm_qk norm_query norm_key after_attention norm_mlp after_mlp norm_token rotary window "
    "sink_tokens experts activation_params sinks gated mixer latent shared_gate width kv_heads has_kv kv_source "
    "qk_norm_heads norm_experts norm_router after_experts after_beside after_inputs scale",
)
ModelStruct = namedtuple(
    "ModelStruct",
    "heads hidden intermediate layers num_embeddings embedding norm norm_embedding norm_given rotaries activation "
    "gated layer_norm parallel norm_after_rope attn_temp_floor per_layer_size per_layer_table per_layer_norm eps "
    "scale softcap logits_softcap embedding_scale residual_scale logits_scale attn_temp_scale per_layer_scale",
)
Call = namedtuple(
    "Call",
    "rows threads ids inputs_embeds positions angles num_angles layer_ids num_layer_ids hidden_out logit_rows "
    "num_logits workspace workspace_size logits kv pools plan all_reduce replay states experts",
)
PassStruct = namedtuple("PassStruct", "rows nanoseconds match num_guessed num_correct")
Chains = namedtuple(
    "Chains",
    "sequences max_depth depths starts tables temperatures thresholds top_ks noise_ids output_ids keys quantiles "
    "tokens q num_ids feeds_hidden floor texts lengths num_guessed max_guess max_match passes siblings",
    defaults=(0, 0, 0, 0, 0, 0, 0),
)

QUANTS = {
    "q4_0": (32, 288), "q4_1": (32, 320), "q4_k": (256, 2368), "q5_0": (32, 544), "q5_1": (32, 576),
    "q5_k": (256, 4416), "q6_k": (256, 4384), "q8_0": (32, 544), "iq4_nl": (32, 288), "iq4_xs": (256, 2208),
    "mxfp4": (32, 272), "q2_k": (256, 1344), "q3_k": (256, 1824), "codes": (256, 2384),
}  # fmt: skip
"""Block-quantized weights: inputs of a block, and bytes of a block of 16 outputs; ``quants.h`` has their layout."""
KINDS = ("own", "int8", *QUANTS)
"""Forms of weights, by ``LinearStruct.kind``; ``own``: in the dtype of the rows."""
ACTIVATIONS = ("silu", "gelu_tanh", "xielu", "clamped", "sigmoid", "relu2")
MIXERS = ("conv", "delta", "mamba")
NO_LAYER = LinearStruct(*[0] * len(LinearStruct._fields))


def number(value: float) -> int:
    """A double, as a field."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def address(numbers: array[Any] | None) -> int:
    """The address of an array's numbers; 0 if there are none."""
    return numbers.buffer_info()[0] if numbers else 0


def _layout() -> str:
    structs = [each for each in globals().values() if isinstance(each, type) and hasattr(each, "_fields")]
    sizes = (f"{name} {inputs} {size}" for name, (inputs, size) in QUANTS.items())
    lines = [(each.__name__.removesuffix("Struct"), *each._fields) for each in structs]
    lists = ("Activations", *ACTIVATIONS), ("Mixers", *MIXERS)
    return "\n".join(map(" ".join, [*lines, ("Kinds own int8", *sizes), *lists]))


LAYOUT = _layout()
