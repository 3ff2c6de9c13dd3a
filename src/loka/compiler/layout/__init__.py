"""How tensors of a joint graph lie in memory."""
