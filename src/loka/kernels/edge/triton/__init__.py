"""Programs of edges on GPUs: each becomes kernels of its own."""
