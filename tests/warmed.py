"""Imported, it has done what converting a model to FP8 does first in a process: checked kernels, 0.3 s.

A fork of such a process finds the results. One thread, as a fork has no others.
"""

import torch

from loka.core.recipe import Gemm
from loka.kernels.gemm.self_check import self_check

torch.set_num_threads(1)
for _recipe in ("rowwise_e4m3", "rowwise_e4m3_pow2", "tensorwise_e4m3"):
    for _gemm in Gemm:
        self_check(f"emulated:{_recipe}", gemm=_gemm, device="cpu")
