import pytest
import torch

launch = pytest.importorskip("loka.kernels.triton.launch", reason="needs triton")


class Kernel:
    """Counts how often arguments are bound, and keeps what its compiled form is run with."""

    arg_names = ("x", "y", "out", "rows", "BLOCK")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.bound, self.ran = 0, []

    def __getitem__(self, grid):
        def bind(*args, **constants):
            self.bound += 1
            return self

        return bind

    def run(self, *args):
        self.ran.append(args)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_RECORDINGS", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: "stream", raising=False)
    return Kernel()


def call(kernel, x, y, *, zeroed=False):
    """One allocation, and a launch that writes two elements behind its start."""

    def make():
        out = launch.allocated((torch.zeros if zeroed else torch.empty)(4), zeroed=zeroed)
        launch.launch(kernel, (3, 2), (x, y, out[2:], 7), {"BLOCK": 16})
        return out

    slot_of = lambda out, recording: recording.slot_of(out)  # noqa: E731
    return launch.recorded(("call", zeroed), (x, y, None), make, slot_of, lambda slot, tensors: tensors[slot])


def test_a_second_call_runs_on_its_own_tensors(kernel):
    call(kernel, torch.ones(4), torch.ones(4))
    assert not kernel.ran
    x, y = torch.ones(4), torch.ones(4)
    out = call(kernel, x, y)
    assert kernel.bound == 1
    (found,) = kernel.ran
    assert found[:9] == (3, 2, 1, "stream", "function", "metadata", None, None, None)
    assert found[9:] == (x.data_ptr(), y.data_ptr(), out.data_ptr() + 8, 7, 16)
    assert (out.shape, out.stride(), out.dtype) == ((4,), (1,), torch.float32)


def test_memory_that_was_zeros_is_zeros_again(kernel):
    for _ in range(3):
        out = call(kernel, torch.ones(4), torch.ones(4), zeroed=True)
        assert out.tolist() == [0.0] * 4
        out.fill_(7)


def test_one_tensor_twice_and_other_alignment_are_recorded_apart(kernel):
    x, memory = torch.ones(4), torch.ones(8)
    for y in (torch.ones(4), x, memory[:4], memory[1:5]):
        call(kernel, x, y)
    assert kernel.bound == 3, "memory[:4] lies like the first"
    call(kernel, x, x)
    assert kernel.ran[-1][9:11] == (x.data_ptr(), x.data_ptr())
