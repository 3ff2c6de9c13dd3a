"""The same on GPUs."""
