"""What becomes of a file's tensors: they are transformed into weights and laid out for the kernels."""
