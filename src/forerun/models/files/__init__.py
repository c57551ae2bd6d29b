"""From a name to files on this machine: the hub, known models, GGUF and safetensors files, opened and checked."""
