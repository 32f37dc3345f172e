"""The policy: loading, packing, and the forward pass that gives log-probs and entropy of completion tokens."""
