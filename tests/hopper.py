"""A script's beginning with which Triton writes and compiles kernels for sm_90 where there is no GPU."""

DRIVER = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Hopper:  # a driver that compiles, and has nothing to run on
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

triton.runtime.driver.set_active(Hopper())
"""
