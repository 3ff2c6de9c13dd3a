import pytest
import torch


@pytest.fixture
def device():
    """The GPU, or the CPU through triton's interpreter; a process has one or the other."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that a kernel forgets to write holds NaN, not luck: 0xFF bytes, in every float format."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
