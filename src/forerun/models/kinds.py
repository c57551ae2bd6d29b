"""Names of what weights can be quantized to."""

UNQUANTIZED = "none"
KINDS = {"int8": "int8", "int8_rows": "int8 by rows"}
CPU_KINDS = tuple(KINDS)
GPU_KINDS = ("int8", "fp8")
