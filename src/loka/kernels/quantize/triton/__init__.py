"""Triton kernels that quantize operands, weights and residuals. Twins: ../quantizer.py, ../weight_copies.py."""
