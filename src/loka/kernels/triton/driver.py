"""Two calls of CUDA's driver that torch has only with more around them: zeros, and graphs of launches.

`torch.zeros` and `zero_` cost the host 8 and 6 us, the driver's memset 2. While a `torch.cuda.CUDAGraph` is captured
other threads that draw random numbers get errors, which a capture in the middle of eager training may not cause.
Kernels of sites draw none, so a graph of them needs nothing of that, and its launch takes the host 2 us (H200, torch
2.11).

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

import ctypes
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loka.core.recording import captures

_NON_BLOCKING, _THREAD_LOCAL = 1, 1  # CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")  # torch has loaded it
    library.cuMemsetD8Async.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    library.cuGraphLaunch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.cuGraphExecDestroy.argtypes = (ctypes.c_void_p,)
    library.cuGraphDestroy.argtypes = (ctypes.c_void_p,)
    library.cuStreamBeginCapture_v2.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.cuStreamEndCapture.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.cuGraphInstantiateWithFlags.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    return library


def zero(address: int, size: int, stream: int) -> None:
    """Zeros in `size` bytes of the current device's memory, in the order of `stream`."""
    _check("cuMemsetD8Async", _driver().cuMemsetD8Async(address, 0, size, stream))


class Graph:
    """Launches that were captured. Destroyed with the last reference, but not by a fork of the process; where it runs
    then, it runs to its end."""

    def __init__(self, handle: int) -> None:
        self._handle, self._process = handle, os.getpid()
        self._launch, self._destroy = _driver().cuGraphLaunch, _driver().cuGraphExecDestroy

    def launch(self, stream: int) -> None:
        if failed := self._launch(self._handle, stream):
            _check("cuGraphLaunch", failed)

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._destroy(self._handle)


def captured(launches: Callable[[int], None], device: int, target: int) -> Graph | None:
    """A graph of what `launches` puts on the stream that it is given, which is the current one meanwhile.

    Nothing of it runs. It will run on `target`, a stream of `device`, the current device, and on no other: what
    libraries allocate for their kernels meanwhile, such as a workspace of cuBLAS, is memory that all graphs of this
    stream share and nobody else gets, even where torch frees it. None while another thread captures.

    Another thread may not wait for the whole device meanwhile (`torch.cuda.synchronize`): that raises in it, and this
    capture fails. Captures take turns for that; what else threads of the caller do is not known here. Nor may garbage
    be collected: graphs of torch's wait for the device when they are destroyed.
    """
    turn = captures(device)
    if not turn.acquire(blocking=False):
        return None
    graph, made = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        (stream, pool), driver = _place(device, target), _driver()
        torch.cuda.current_blas_handle()  # a thread's first one is not made in a capture
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
        try:
            with _no_collections(), torch.cuda.stream(stream):
                _check("cuStreamBeginCapture", driver.cuStreamBeginCapture_v2(stream.cuda_stream, _THREAD_LOCAL))
                try:
                    launches(stream.cuda_stream)
                finally:
                    ended = driver.cuStreamEndCapture(stream.cuda_stream, ctypes.byref(graph))
        finally:
            torch._C._cuda_endAllocateToPool(device, pool)  # and is not released: it lives as long as the process
        _check("cuStreamEndCapture", ended)
        _check("cuGraphInstantiate", driver.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, 0))
        assert made.value is not None
        return Graph(made.value)
    finally:
        if graph.value:  # of launches that raised, too
            _driver().cuGraphDestroy(graph)
        turn.release()


class _Uncollected:
    """Captures that run now, one for each device at most, and whether garbage was collected before the first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler, run while it is held, may train
        self.captures, self.collecting = 0, False

    def forked(self) -> None:
        """In a fork of the process no capture goes on, and none would turn the collector on again."""
        if self.captures and self.collecting:
            gc.enable()
        self.lock, self.captures = threading.RLock(), 0


_uncollected = _Uncollected()
os.register_at_fork(after_in_child=_uncollected.forked)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Inside, no thread collects garbage. The collector is that of the process, so the last one inside turns it on."""
    with _uncollected.lock:
        if not _uncollected.captures:
            _uncollected.collecting = gc.isenabled()
        _uncollected.captures += 1
        gc.disable()
    try:
        yield
    finally:
        with _uncollected.lock:
            _uncollected.captures -= 1
            if not _uncollected.captures and _uncollected.collecting:
                gc.enable()


@functools.cache
def _place(device: int, target: int) -> tuple[torch.cuda.Stream, Any]:
    """A stream for captures alone, and memory for what they allocate. Streams of torch are handed out in turns, and
    what lies on them is others': cuBLAS has a workspace for each."""
    stream = ctypes.c_void_p()
    _check("cuStreamCreate", _driver().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    return torch.cuda.ExternalStream(stream.value, device=device), torch.cuda.graph_pool_handle()


def _check(call: str, failed: int) -> None:
    if failed:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(failed, ctypes.byref(text))
        raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()} ({failed})")
