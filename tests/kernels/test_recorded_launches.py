import ctypes

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
    monkeypatch.setattr(launch, "zero", lambda address, size, stream: ctypes.memset(address, 0, size))
    return Kernel()


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Keys of what may be launched as a graph; each is launched one by one here."""
    keys = []

    def one_by_one(key, launches, stream, device):
        keys.append(key)
        launches(stream)

    monkeypatch.setattr(launch, "launch_kept", one_by_one)
    return keys


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


SCRATCH = {"words": (torch.int32, 70, True), "bytes": (torch.uint8, 100, False), "more": (torch.int64, 3, True)}


def call_with_scratch(kernel, x):
    """Two launches that hand on scratch, some of which is zeros, and an output between its pieces."""

    def make():
        pieces = []
        for dtype, size, zeroed in SCRATCH.values():
            pieces.append(launch.allocated((torch.zeros if zeroed else torch.empty)(size, dtype=dtype), zeroed=zeroed))
            if len(pieces) == 1:
                out = launch.allocated(torch.empty(4))
        for piece in (*pieces, pieces[0][16:]):
            launch.launch(kernel, (1, 1), (x, piece, out, 7), {"BLOCK": 16})
        return out

    slot_of = lambda out, recording: recording.slot_of(out)  # noqa: E731
    return launch.recorded(("scratch",), (x,), make, slot_of, lambda slot, tensors: tensors[slot])


def test_scratch_is_one_piece_of_memory_with_its_zeros_first(kernel, monkeypatch):
    zeroed = []
    monkeypatch.setattr(launch, "zero", lambda *given: zeroed.append(given))
    x = torch.ones(4)
    for _ in range(2):
        out = call_with_scratch(kernel, x)
    words, bytes_, more, behind = (ran[10] for ran in kernel.ran)
    assert (more - words, bytes_ - words, behind - words) == (512, 768, 64), "each at a multiple of 256 bytes"
    assert zeroed == [(words, 768, "stream")], "280 and 24 bytes, of which each piece is whole"
    assert {ran[11] for ran in kernel.ran} == {out.data_ptr()}


def test_launches_are_kept_by_every_address_and_the_stream(kernel, kept, monkeypatch):
    x, y = torch.ones(4), torch.ones(4)
    outs = [call_with_scratch(kernel, given) for given in (x, x, x, y)]
    assert len(set(kept)) == len(kept) == 3, "other results, then another operand; the first call is recorded"
    recording, stream, scratch, *addresses = kept[0]
    assert (stream, recording.steps[0].grid) == ("stream", (1, 1))
    assert addresses[0] == x.data_ptr()
    assert outs[1].data_ptr() in addresses
    assert scratch in addresses
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: "other", raising=False)
    call_with_scratch(kernel, x)
    assert kept[-1][1] == "other"


def test_one_launch_is_no_graph(kernel, kept):
    for _ in range(3):
        call(kernel, torch.ones(4), torch.ones(4))
    assert len(kernel.ran) == 2
    assert not kept


def call_of_torch(x, scale):
    """Scratch that a call of torch's writes, and a product of a transposed view of it with a part of what is given."""

    def make():
        low = launch.allocated(torch.empty(3, 4, dtype=torch.float64))
        more = launch.allocated(torch.empty(6, dtype=torch.int32))
        out = launch.allocated(torch.empty(4, 3))
        launch.call(lambda x, low, more: (low.copy_(2 * x), more.fill_(5)), x, low, more)
        launch.call(
            lambda a, scale, more, out: out.copy_(a * scale * more.sum()), low.t(), scale.view(1, 1), more[4:], out
        )
        return out

    slot_of = lambda out, recording: recording.slot_of(out)  # noqa: E731
    return launch.recorded(("torch",), (x, scale), make, slot_of, lambda slot, tensors: tensors[slot])


def test_calls_of_torch_run_again_on_tensors_that_lie_alike(kernel):
    held = []
    for seed in range(5):
        torch.manual_seed(seed)
        x, scale = torch.randn(3, 4), torch.randn(3)[1:2]
        held.append((call_of_torch(x, scale), 20 * x.t() * scale))
    for found, right in held:
        torch.testing.assert_close(found, right)


def test_a_square_operand_that_was_turned_is_turned_again(kernel):
    def call(x):
        def make():
            out = launch.allocated(torch.empty(3, 3))
            launch.call(lambda a, b, out: out.copy_(a).sub_(b), x, x.t(), out.t())
            return out

        slot_of = lambda out, recording: recording.slot_of(out)  # noqa: E731
        return launch.recorded(("square",), (x,), make, slot_of, lambda slot, tensors: tensors[slot])

    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 3)
        assert torch.equal(call(x), x.t() - x)


def test_an_operand_of_another_type_is_not_taken_for_what_it_lies_in(kernel):
    def call(x):
        def make():
            out = launch.allocated(torch.empty(4))
            launch.call(lambda x, bits: bits.copy_(x), x, out.view(torch.int32))
            return out

        slot_of = lambda out, recording: recording.slot_of(out)  # noqa: E731
        return launch.recorded(("bits",), (x,), make, slot_of, lambda slot, tensors: tensors[slot])

    x = torch.arange(4, dtype=torch.int32)
    assert torch.equal(call(x).view(torch.int32), x)
    with pytest.raises(AssertionError, match="of another type"):
        call(x)


def test_a_recording_inside_another_is_a_part_of_it(kernel, kept):
    def make(x):
        return call(kernel, x, call(kernel, x, x))

    def outer(x):
        slot_of = lambda out, recording: recording.slot_of(out)  # noqa: E731
        return launch.recorded(("outer",), (x,), lambda: make(x), slot_of, lambda slot, tensors: tensors[slot])

    outer(torch.ones(4))
    assert len(launch._RECORDINGS) == 1
    assert kernel.bound == 2
    x = torch.ones(4)
    out = outer(x)
    first, second = kernel.ran
    assert second[9:11] == (x.data_ptr(), first[11] - 8)
    assert second[11] == out.data_ptr() + 8
    assert len(kept) == 1
