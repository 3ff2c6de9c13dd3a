"""What can compute a scaled GEMM: kernels that explain themselves, and the one place that runs them."""
