"""Captures of a process, without a GPU: one at a time."""

import concurrent.futures
import contextlib
import gc
import multiprocessing
import sys
import threading
import time
import weakref
from types import FunctionType, SimpleNamespace

import pytest
import torch

from loka.core import recording


def is_free():
    """Whether another thread may capture now."""
    found = []

    def look():
        found.append(recording.captures(0).acquire(blocking=False))
        if found[0]:
            recording.captures(0).release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def cuda(monkeypatch):
    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    torch_graph = lambda *given, **more: contextlib.nullcontext()  # noqa: E731
    for name, fake in {
        "CUDAGraph": SimpleNamespace,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device: None,
        "default_generators": [generator],
        "device": lambda device: contextlib.nullcontext(),
        "graph": torch_graph,
        "set_stream": lambda stream: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def test_while_one_thread_records_no_other_captures(cuda):
    stream = SimpleNamespace(device=torch.device("cuda", 0))
    assert recording.record(is_free, stream.device, stream)[1] is False
    assert is_free()

    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        recording.record(broken, stream.device, stream)
    assert is_free()


def test_a_kept_graph_is_not_captured_while_another_thread_records():
    driver = pytest.importorskip("loka.kernels.triton.driver", reason="needs triton")
    found = []
    with recording.captures(0):
        thread = threading.Thread(target=lambda: found.append(driver.captured(found.append, 0, 0)))
        thread.start()
        thread.join()
    assert found == [None]
    assert recording.captures(1) is not recording.captures(0), "what waits for one device is no matter to another"


@contextlib.contextmanager
def running(target):
    """The thread that runs `target`, which waits for the lock it is given."""
    lock = threading.Lock()
    with lock:
        thread = threading.Thread(target=target, args=(lock,), daemon=True)
        thread.start()
        yield thread
    thread.join()


def work(lock):
    lock.acquire()
    lock.release()


def _engine_run_backward(lock):
    lock.acquire()
    lock.release()


def of(module):
    return FunctionType(work.__code__, {"__name__": module})


@pytest.fixture
def among(monkeypatch):
    """Whether a capture hinders nobody where these threads and this one are all."""
    frames = sys._current_frames
    monkeypatch.setattr(recording, "_eager", None)

    def may_capture(*threads):
        here = {thread.ident for thread in threads} | {threading.get_ident()}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "_current_frames", lambda: {k: v for k, v in frames().items() if k in here})
            return recording.may_capture_eagerly(0)

    return may_capture


def test_nothing_is_captured_while_another_thread_may_wait_for_the_device(among):
    assert among()
    with running(work) as other, running(of("multiprocessing.pool")) as pool, running(_engine_run_backward) as trains:
        assert [among(other), among(pool), among(trains)] == [False] * 3, "the last may end its backward pass"
        recording.eager_graphs()
        assert among(other), "the caller says that it waits for no device"
        assert recording.may_capture_eagerly(7), "and on any stream"
        recording.eager_graphs(False)
        assert not among()
        recording.eager_graphs(None)
        assert [among(), among(other), recording.may_capture_eagerly(7)] == [True, False, False]
    assert among(other), "it has ended"


def test_threads_that_pin_memory_feed_queues_or_watch_compilers_wait_for_no_device(among):
    with (
        running(of("torch.utils.data._utils.pin_memory")) as pins,
        running(of("torch._inductor.compile_worker.timer")) as watches,
        running(of("tqdm._monitor")) as draws,
        running(of("rich.live")) as refreshes,
        running(of("loka.probe.async_save")) as saves,
        running(of(None)) as nameless,
        running(work) as other,
    ):
        queue = multiprocessing.Queue()
        queue.put(0)
        feeds = next(thread for thread in threading.enumerate() if thread.name == "QueueFeederThread")
        assert queue.get() == 0
        assert among(pins, watches, draws, refreshes, saves, feeds)
        assert not among(nameless)
        assert not among(pins, watches, draws, saves, feeds, other)
        queue.close(), queue.join_thread()


def test_an_executors_thread_that_waits_for_work_waits_for_no_device(among):
    """Inductor keeps some of these."""
    go = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        (idle,) = executor._threads
        began = time.monotonic()
        while not among(idle):  # it goes back to waiting some time after its work has a result
            assert time.monotonic() - began < 60
        busy = executor.submit(go.wait)
        while not busy.running():
            time.sleep(0.001)
        assert not among(idle)
        go.set()
        busy.result()


def test_work_that_an_executor_has_queued_may_wait_for_the_device(among):
    go = threading.Event()
    interval = sys.getswitchinterval()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        (thread,) = executor._threads
        began = time.monotonic()
        while not among(thread):
            assert time.monotonic() - began < 60
        sys.setswitchinterval(10)  # seconds, in which the thread does not get to run
        try:
            executor.submit(go.wait)
            queued = among(thread)
        finally:
            sys.setswitchinterval(interval)
            go.set()
    assert not queued


def test_a_backward_pass_is_waited_for_by_the_one_thread_that_asked_for_it(among):
    found = []

    class Site(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            found.extend([among(), among(asks), among(asks, asks_too), among(asks, other), among(other)])
            return grad

    with running(_engine_run_backward) as asks, running(_engine_run_backward) as asks_too, running(work) as other:
        Site.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize("green", [False, True])
def test_asking_keeps_no_tensor_alive(among, monkeypatch, green):
    """Frames hold what their functions hold, until the collector comes where one knows itself. Under gevent a thread's
    number is that of a greenlet, and its own frame cannot be told from others'."""

    def asked():
        held = torch.ones(2)
        with monkeypatch.context() as patch:
            if green:
                patch.setattr(threading, "get_ident", lambda: -1)
            assert not recording.may_capture_eagerly(0)
        return weakref.ref(held)

    gc.disable()
    try:
        with running(work):
            assert asked()() is None
    finally:
        gc.enable()
