"""Our GEMMs for GPUs. Twins: ../normed_gemm.py, ../adapters/split_gemm.py."""
