"""Whether anything waits for the device, by CUDA's own debug mode."""

import contextlib

import torch


@contextlib.contextmanager
def nothing_synchronizes():
    """What runs inside fails where it waits for the device; without one it just runs."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
