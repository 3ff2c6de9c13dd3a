"""Records what a function launches into a CUDA graph.

A capture runs the host's half of a function and none of the device's. Where it fails, the state of CUDA is restored;
undoing what the host did is up to the caller.
"""

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch

from loka.core.device import index_of

T = TypeVar("T")


class Recording(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None: ...


_CAPTURES: dict[int, threading.RLock] = {}


def captures(index: int) -> threading.RLock:
    """Held by the thread that captures on this CUDA device. Before a capture of its own torch waits for the device,
    which raises where another thread captures meanwhile, and breaks that one's capture too."""
    return _CAPTURES.setdefault(index, threading.RLock())


_eager: bool | None = None


def eager_graphs(on: bool | None = True) -> None:
    """Whether the launches of an eager site's pass are one CUDA graph wherever their addresses come again.

    Where it may capture so, a compiler also times cuBLASLt's algorithms (kernels/gemm/algorithms.py).

    Results are the same, bit for bit, and the host, for which narrow layers wait, takes less time: for a step of six
    layers of 2048 3.7 to 4.9 ms in place of 6.4 to 9.3 (H200, docs/log.md). Programs of a region that runs outside of
    any CUDA graph are launched likewise; in other graphs and on CPUs nothing changes. Graphs are captured in the middle
    of training, and CUDA lets nobody wait for a device while anything is captured there: `torch.cuda.synchronize`
    raises in any other thread. Waiting for streams and events is fine.

    Args:
        on: None, as at the start of a process: graphs are captured on the default stream, while no other thread runs
            Python that may wait for the device. True: on any stream, whatever threads there are, so it is the caller
            who knows that none of them waits. False: never; launches are single again, and the graphs are destroyed.
    """
    global _eager
    _eager = on


def eager_graphs_are_off() -> bool:
    return _eager is False


def may_capture_eagerly(stream: int) -> bool:
    """Whether a capture in the middle of training pays and hinders nobody, by `eager_graphs`, for launches on `stream`,
    the device's default one if it is 0. On others steps are warmed up that are captured or timed as a whole, and each
    would take memory for cuBLAS to work in."""
    if _eager is not None:
        return _eager
    if stream:
        return False
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # gevent gives another number, and this thread counts as another one
    others = list(itertools.islice((frame.f_code.co_name for frame in frames.values() if not _is_quiet(frame)), 2))
    frames.clear()  # a frame that knows itself would live on, with all tensors of its callers
    if torch._C._current_autograd_node() is None:
        return not others
    # Here a backward pass runs, and the thread that asked for it waits until it ends.
    return others in ([], ["_engine_run_backward"])


_QUIET = (
    "loka.probe.async_save", "multiprocessing.queues", "rich.", "torch._inductor.compile_worker.",
    "torch.utils.data._utils.", "tqdm.",
)  # fmt: skip
"""Modules whose threads write what a probe learnt, feed queues, watch compilers, pin memory or draw: they wait for no
device."""
_IDLE = ("concurrent.futures.thread", "_worker")
"""The innermost function of an executor's thread that waits for work: Inductor keeps some."""
_QUEUE = "work_queue"
"""Its variable that holds the queue."""


def _is_quiet(innermost: FrameType) -> bool:
    """Whether the code that this thread was started for is of such a module, or waits for work and none is queued."""
    if (innermost.f_globals.get("__name__"), innermost.f_code.co_name) == _IDLE:
        # Work that was submitted a moment ago, which the thread has not yet taken, may wait for the device.
        queue = innermost.f_locals.get(_QUEUE)
        return queue is not None and queue.empty()
    frame: FrameType | None = innermost
    started = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        started, frame = (started if name == "threading" else name), frame.f_back
    return started.startswith(_QUIET)


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this process captures steps with collectives on `device`, a CUDA device.

    Autograd accumulates a gradient on the stream on which it first saw the parameter, and a capture may not wait for
    another stream. DistributedDataParallel sees the parameters when it is built, so build it on this stream.
    """
    return _stream(index_of(device))


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@contextlib.contextmanager
def synced(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs on `stream`, after everything that the current stream holds and before anything that it gets next."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def record(
    function: Callable[[], T], device: torch.device, stream: torch.cuda.Stream | None, pool: Any = None
) -> tuple[Recording, T]:
    """A graph of what `function` launches, and the function's result, whose values come with the first replay.

    `pool`: memory shared with other graphs, of which no two may run at once, and whose results are copied before
    another one runs. Without it the graph has memory of its own.

    Raises what `function` raises. CUDA's own state is then as before; that of the host is up to the caller.
    """
    assert stream is not None
    device = stream.device  # the one given may have no index
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    before = torch.cuda.current_stream(device)
    generator = torch.cuda.default_generators[device.index]
    clean = generator.clone_state()
    # Weights that autocast has cast before the capture would be stale in every replay, and those
    # that it casts inside are not computed before the first one.
    torch.clear_autocast_cache()
    raised: BaseException | None = None
    try:
        # Other threads, such as a loader's that pins memory, may go on using CUDA meanwhile.
        with (
            captures(device.index),
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                result = function()
            except BaseException as error:
                raised = error
                raise
    except BaseException as error:
        if error is raised:
            raise
        # Ending a broken capture raises too, which leaves the generator in capture mode ("Offset
        # increment outside graph capture" at the next dropout; a clone never is in it) and the
        # allocator recording to the graph's pool.
        generator.graphsafe_set_state(clean)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        if raised is not None:
            raise raised from None  # the cause, rather than its effect on the capture
        raise
    finally:
        torch.cuda.set_stream(before)  # stays the graph's where ending the capture raises
        torch.clear_autocast_cache()
    return graph, result
