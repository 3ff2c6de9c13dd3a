"""What can compute a scaled GEMM, and the one place that runs it."""
