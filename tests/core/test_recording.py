"""Captures of a process, without a GPU: one at a time."""

import contextlib
import threading
from types import SimpleNamespace

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
