"""Names of quantized formats, for checking options before torch is imported. ``formats`` implements them."""

UNQUANTIZED = "none"
KINDS = {"int8": "int8", "int8_rows": "int8 by rows"}
"""8 bits with one scale per output: what their layers are called."""
BLOCKS = ("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q8_0")
"""GGUF's types with scales for blocks of inputs."""
FLOATS = ("bfloat16", "float16", "float32")
"""Not quantized, even if the checkpoint is."""
CPU_KINDS = (*KINDS, *BLOCKS)
TORCHAO_KINDS = ("int8", "fp8")
TRITON_KINDS = ("int8_rows", "q4_0", "q4_1", "q4_k", "q8_0")
TRITON_BLOCKS = ("q4_0", "q4_1", "q4_k", "q6_k", "q8_0")
"""GGUF's types that stay in their bits on a GPU; others become numbers."""
GPU_KINDS = (*TORCHAO_KINDS, *TRITON_KINDS)
