"""Tensor parallelism: the layers of one model over several processes. Rank 0 is the process that asked for the model;
it decides everything and tells the others each forward's rows."""
