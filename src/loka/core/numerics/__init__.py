"""What quantizing is and what it costs, in plain PyTorch: twins, depths, errors, effects."""
