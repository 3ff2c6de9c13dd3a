"""Our GEMMs for GPUs. Twin: ../normed_gemm.py."""
