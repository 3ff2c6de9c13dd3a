"""From high precision to FP8: operands of a GEMM, all weights of a graph. Twins stand here."""
