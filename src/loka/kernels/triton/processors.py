"""How wide a GPU is: persistent kernels start as many programs as its multiprocessors hold."""

import functools

import torch


@functools.lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
