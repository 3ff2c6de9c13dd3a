"""Captures by CUDA's driver, without one: what is done in turn, and undone where something fails."""

import contextlib
import gc
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from loka.core.recording import captures

driver = pytest.importorskip("loka.kernels.triton.driver", reason="needs triton")

GRAPH, MADE = 11, 22


class Driver:
    """Notes calls; those in `failing` give an error."""

    def __init__(self, log):
        self.log, self.failing = log, ()

    def __getattr__(self, name):
        def call(*given):
            if name == "cuGetErrorString":
                return 0
            self.log.append(name)
            if name in self.failing:
                return 2
            if name == "cuStreamEndCapture":
                given[1]._obj.value = GRAPH
            if name == "cuGraphInstantiateWithFlags":
                assert given[1].value == GRAPH
                given[0]._obj.value = MADE
            return 0

        return call


@pytest.fixture
def log(monkeypatch):
    log = []
    fake = Driver(log)
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(driver, "_place", lambda device, target: (SimpleNamespace(cuda_stream=33), (0, 1)))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: log.append("handle"))
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: log.append(name), raising=False)

    @contextlib.contextmanager
    def current(stream):
        log.append("stream")
        yield
        log.append("stream before")

    monkeypatch.setattr(torch.cuda, "stream", current)
    return SimpleNamespace(calls=log, driver=fake)


BEGIN = ["handle", "_cuda_beginAllocateCurrentThreadToPool", "stream", "cuStreamBeginCapture_v2"]


def test_a_capture_and_the_end_of_its_graph(log):
    graph = driver.captured(log.calls.append, 0, 44)
    ended = ["cuStreamEndCapture", "stream before", "_cuda_endAllocateToPool"]
    assert log.calls == [*BEGIN, 33, *ended, "cuGraphInstantiateWithFlags", "cuGraphDestroy"]
    log.calls.clear()
    graph.launch(44)
    del graph
    assert log.calls == ["cuGraphLaunch", "cuGraphExecDestroy"]


def test_a_fork_does_not_destroy_a_graph(log, monkeypatch):
    """CUDA may not be called there at all."""
    graph = driver.captured(log.calls.append, 0, 44)
    monkeypatch.setattr(driver.os, "getpid", lambda: -1)
    del graph
    assert "cuGraphExecDestroy" not in log.calls


def test_a_call_that_raises_leaves_nothing_behind(log):
    def broken(stream):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.captured(broken, 0, 44)
    assert log.calls == [*BEGIN, "cuStreamEndCapture", "_cuda_endAllocateToPool", "cuGraphDestroy"]
    assert not captures(0)._is_owned()


def test_no_garbage_is_collected_in_a_capture(log):
    """It may hold a graph of torch's, and that waits for the device when it is destroyed."""
    found = []

    def broken(stream):
        raise KeyboardInterrupt

    driver.captured(lambda stream: found.append(gc.isenabled()), 0, 44)
    with pytest.raises(KeyboardInterrupt):
        driver.captured(broken, 0, 44)
    found.append(gc.isenabled())
    gc.disable()
    try:
        driver.captured(lambda stream: None, 0, 44)
        found.append(gc.isenabled())
    finally:
        gc.enable()
    assert found == [False, True, False]


def test_garbage_is_collected_again_behind_the_last_of_several_captures(log):
    """Of two devices, the second begins in the first and ends behind it."""
    found, begun, other, ended = [], *(threading.Event() for _ in range(3))

    def first(stream):
        begun.set()
        assert other.wait(10)

    def second(stream):
        other.set()
        assert ended.wait(10)
        found.append(gc.isenabled())

    def run():
        driver.captured(first, 0, 44)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(10)
    driver.captured(second, 1, 44)
    thread.join()
    assert [*found, gc.isenabled()] == [False, True]


def test_a_fork_amid_a_capture_collects_garbage(log):
    """Such as a DataLoader's worker that another thread starts."""
    ended = []

    def fork(stream):
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        ended.append(os.waitpid(child, 0)[1])

    driver.captured(fork, 0, 44)
    assert ended == [0]


@pytest.mark.parametrize("call", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_what_the_driver_refuses_leaves_nothing_behind(log, call):
    log.driver.failing = (call,)
    with pytest.raises(RuntimeError, match=r"\(2\)"):
        driver.captured(log.calls.append, 0, 44)
    assert "_cuda_endAllocateToPool" in log.calls
    assert ("cuGraphDestroy" in log.calls) == (call == "cuGraphInstantiateWithFlags")
    assert not captures(0)._is_owned()
