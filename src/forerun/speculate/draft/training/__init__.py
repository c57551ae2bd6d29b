"""Training of heads, in the laboratory and while they serve."""
