"""Our GEMMs for GPUs. Twins: ../fused_gemm.py, ../adapters/split_gemm.py."""
