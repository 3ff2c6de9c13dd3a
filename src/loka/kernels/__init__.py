"""What can compute a scaled GEMM: kernels that say what they cannot run, and the one place that runs them."""
