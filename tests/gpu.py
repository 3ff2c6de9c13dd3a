"""For tests of what GPUs run: whether anything waits for one, and kernels for one where there is none."""

import contextlib

import torch

DRIVER = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Hopper:  # a driver that compiles, and has nothing to run on
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

triton.runtime.driver.set_active(Hopper())
"""
"""How a script begins whose kernels Triton compiles for sm_90."""


@contextlib.contextmanager
def nothing_synchronizes():
    """What runs inside fails where it waits for the device, by CUDA's own debug mode; without one it just runs."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
