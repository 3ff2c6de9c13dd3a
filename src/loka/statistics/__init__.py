"""What is kept of tensors, and operands drawn from it."""
