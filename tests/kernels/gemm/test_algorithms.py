"""Which algorithm of cuBLASLt runs: only one that gives torch's bits, and only where its time surely pays."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch

from loka.core import recording
from loka.core.error import Estimate
from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem
from loka.core.recipe import Gemm
from loka.core.timing import Race, Timing
from loka.kernels.gemm import algorithms
from loka.kernels.gemm.adapters.cublaslt import CUBLASLT
from loka.kernels.gemm.adapters.torch_scaled import TORCH
from loka.kernels.gemm.run import run_gemm

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEEDS_ROWS = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has rowwise FP8 on the CPU from 2.13 on")


def sided(m, n, k, target="sm_90"):
    return Problem(gemm=Gemm.OUTPUT, m=m, n=n, k=k, dtype="bfloat16", target=target)


def race_of(winner, speedup):
    one = Timing(microseconds=Estimate(10.0, 10.0, 10.0), speedup=Estimate(1.0, 1.0, 1.0), rounds=15)
    timings = {"torch": one, winner: replace(one, speedup=speedup)}
    return Race(timings=timings, samples={}, winner=winner, rounds=15, ended="decided")


def test_an_algorithm_is_taken_where_it_surely_pays():
    problem = sided(64, 32, 16)
    assert algorithms._choice(race_of("cublaslt@3", Estimate(1.2, 1.1, 1.3)), problem) == "cublaslt@3"
    assert algorithms._choice(race_of("cublaslt@3", Estimate(1.02, 0.99, 1.05)), problem) is None
    assert algorithms._choice(race_of("torch", Estimate(1.0, 1.0, 1.0)), problem) is None


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Problems that are timed; the first algorithm wins. A new process begins where `_searched` forgets."""
    raced = []

    def race(runs, **options):
        raced.append(options["device"])
        return race_of(list(runs)[-1], Estimate(1.2, 1.1, 1.3))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(algorithms, "time_interleaved", race)
    monkeypatch.setattr(algorithms, "_with_torchs_bits", lambda *given: {"torch": None, "cublaslt@3": None})
    monkeypatch.setattr(algorithms, "_OTHERS", {"torch": (TORCH, replace(CUBLASLT, missing=lambda: None))})
    monkeypatch.setattr(algorithms.lt, "version", lambda: 130000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    algorithms._searched.cache_clear()
    recording.eager_graphs()  # whatever threads the runner of the tests has
    yield raced
    recording.eager_graphs(None)
    algorithms._searched.cache_clear()


def searched_anew(problem=None, device=CUDA):
    algorithms._searched.cache_clear()
    return algorithms.faster_than_torch("torch", problem or sided(64, 32, 16), device)


def test_what_was_found_is_known_to_later_processes(timed, tmp_path, monkeypatch):
    assert [searched_anew() for _ in range(3)] == ["cublaslt@3"] * 3
    assert len(timed) == 1
    searched_anew(sided(64, 48, 16))
    assert len(timed) == 2
    monkeypatch.setattr(algorithms.lt, "version", lambda: 130100)
    searched_anew()
    assert len(timed) == 3, "by another version of cuBLASLt"
    assert len(list((tmp_path / "loka_algorithms").iterdir())) == 3


def test_what_cublaslt_cannot_run_and_what_has_no_rival_is_not_timed(timed, monkeypatch):
    assert searched_anew(sided(64, 32, 15)) is None, "K is no multiple of 16"
    with monkeypatch.context() as patch:
        patch.setattr(algorithms, "_OTHERS", {"torch": (TORCH, replace(CUBLASLT, missing=lambda: "not there"))})
        assert searched_anew() is None
    with monkeypatch.context() as patch:
        patch.setattr(algorithms, "_with_torchs_bits", lambda *given: {"torch": None})
        assert searched_anew(sided(64, 48, 16)) is None
    assert timed == []


def test_that_none_is_faster_is_known_too(timed, monkeypatch):
    slow = lambda runs, **options: timed.append(1) or race_of("cublaslt@3", Estimate(1.0, 0.9, 1.1))  # noqa: E731
    monkeypatch.setattr(algorithms, "time_interleaved", slow)
    assert [searched_anew() for _ in range(3)] == [None] * 3
    assert len(timed) == 1


@pytest.mark.parametrize("content", [b"cublaslt@", b"torch@3", b"\xff\xfe", b"cublaslt@3; rm", b"cublaslt@-1"])
def test_a_damaged_file_is_timed_again(timed, tmp_path, content):
    searched_anew()
    (file,) = (tmp_path / "loka_algorithms").iterdir()
    file.write_bytes(content)
    assert searched_anew() == "cublaslt@3"
    assert len(timed) == 2
    assert file.read_bytes() == b"cublaslt@3"


def test_where_nothing_can_be_written_it_is_timed_in_each_process(timed, tmp_path):
    (tmp_path / "loka_algorithms").write_text("a file in the folder's place")
    assert [searched_anew(), searched_anew()] == ["cublaslt@3"] * 2
    assert len(timed) == 2


def test_nothing_is_timed_on_a_cpu_and_inside_of_a_capture(timed, monkeypatch):
    assert searched_anew(device=CPU) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert searched_anew() is None
    assert timed == []


def test_while_a_thread_may_wait_for_the_device_what_was_found_counts_alone(timed):
    recording.eager_graphs(None)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: ended.wait())
    thread.start()
    try:
        assert searched_anew() is None
        recording.eager_graphs(False)
        assert searched_anew() is None
        assert timed == []
        recording.eager_graphs()
        assert algorithms.faster_than_torch("torch", sided(64, 32, 16), CUDA) == "cublaslt@3", "asked again"
        recording.eager_graphs(None)
        assert searched_anew() == "cublaslt@3"
    finally:
        ended.set(), thread.join()
    assert len(timed) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no capture here")])
def test_where_timing_fails_torchs_own_runs_until_it_can_be_timed(timed, monkeypatch, error):
    def fails(*given):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(algorithms, "_with_torchs_bits", fails)
        assert searched_anew() is None
    assert algorithms.faster_than_torch("torch", sided(64, 32, 16), CUDA) == "cublaslt@3"


@NEEDS_ROWS
def test_algorithms_of_other_bits_and_those_that_fail_do_not_race(monkeypatch):
    def run(a, b, dtype, *, algorithm=0):
        if algorithm == 1:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        out = TORCH.run(a, b, dtype)
        return out.clone().mul_(1.01) if algorithm == 2 else out

    monkeypatch.setattr(algorithms, "uncut", lambda problem, recipe, *, fast: [0, 1, 2, 3])
    found = algorithms._with_torchs_bits(TORCH, replace(TORCH, name="other", run=run), sided(64, 32, 48, "cpu"), CPU)
    assert list(found) == ["torch", "other@0", "other@3"]
    assert torch.equal(found["other@3"](), found["torch"]())


@NEEDS_ROWS
def test_an_algorithm_for_which_memory_is_short_is_not_taken_for_one_that_fails(monkeypatch):
    def run(a, b, dtype, *, algorithm=0):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(algorithms, "uncut", lambda problem, recipe, *, fast: [0])
    with pytest.raises(torch.OutOfMemoryError):
        algorithms._with_torchs_bits(TORCH, replace(TORCH, name="other", run=run), sided(64, 32, 48, "cpu"), CPU)


@NEEDS_ROWS
def test_another_order_of_additions_shows_in_the_bits(monkeypatch):
    """Of normal numbers in e4m3 float32 holds sums without rounding."""

    def run(a, b, dtype, *, algorithm=0):
        backwards = (
            Quantized(low.data.view(torch.uint8).flip(1).view(low.data.dtype), low.scale, low.cast) for low in (a, b)
        )
        return TORCH.run(*backwards, dtype)

    problem = replace(sided(64, 64, 256, "cpu"), dtype="float32")
    other = replace(TORCH, name="other", run=run)
    generator = torch.Generator().manual_seed(0)
    a, b = algorithms._operands(problem, algorithms._normal, generator)
    assert torch.equal(run(a, b, torch.float32), TORCH.run(a, b, torch.float32))
    monkeypatch.setattr(algorithms, "uncut", lambda problem, recipe, *, fast: [0])
    assert list(algorithms._with_torchs_bits(TORCH, other, problem, CPU)) == ["torch"]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "gemm"), [("torch_fast", Gemm.OUTPUT), ("torch", Gemm.GRAD_WEIGHT)])
@pytest.mark.parametrize("raced", [True, False])
def test_what_is_chosen_gives_torchs_bits(kernel, gemm, raced, monkeypatch, tmp_path):
    """Where nothing is timed, the last algorithm wins."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if not raced:
        fake = lambda runs, **rest: race_of(list(runs)[-1], Estimate(2.0, 2.0, 2.0))  # noqa: E731
        monkeypatch.setattr(algorithms, "time_interleaved", fake)
    algorithms._searched.cache_clear()
    recording.eager_graphs()
    found = []
    try:
        for m, n, k in ((8192, 3456, 512), (4096, 1024, 2816), (16384, 512, 512), (96, 64, 128)):
            problem = replace(sided(m, n, k), gemm=gemm)
            before = torch.cuda.get_rng_state()
            chosen = algorithms.faster_than_torch(kernel, problem, CUDA)
            assert torch.equal(torch.cuda.get_rng_state(), before)
            found.append(chosen)
            if chosen is None:
                continue
            name, _, number = chosen.partition("@")
            assert name == kernel.replace("torch", "cublaslt")
            a, b = (torch.randn(rows, k, device=CUDA, dtype=torch.bfloat16) for rows in (m, n))
            runs = [f"{kernel}:tensorwise_e4m3", f"{name}:tensorwise_e4m3@{number}"]
            expected, out = (run_gemm(run, a, b, gemm=gemm, dtype=torch.bfloat16) for run in runs)
            assert torch.equal(out, expected), problem
        assert raced or found[0], "a wide result of short sums has several, which hand out tiles by a counter"
    finally:
        recording.eager_graphs(None)
        algorithms._searched.cache_clear()
