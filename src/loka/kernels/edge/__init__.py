"""The code between sites as a program: its steps, its op, and its twin in plain PyTorch."""
