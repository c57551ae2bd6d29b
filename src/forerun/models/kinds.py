"""Names of what weights can be quantized to, by which options are checked before torch is imported. ``formats`` has the
forms."""

UNQUANTIZED = "none"
KINDS = {"int8": "int8", "int8_rows": "int8 by rows"}
"""One scale per output, and what their layers are called."""
BLOCKS = ("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q8_0")
"""Scales by blocks of inputs, as GGUF files have them."""
FLOATS = ("bfloat16", "float16", "float32")
"""Not quantized, whatever the checkpoint holds."""
CPU_KINDS = (*KINDS, *BLOCKS)
GPU_KINDS = ("int8", "fp8")
