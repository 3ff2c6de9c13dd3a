"""Graphs of launches by their addresses: when they are captured, and on a GPU what they compute."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from sites import convert_layer

from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.nn import eager_graphs, site_ops

graphs = pytest.importorskip("loka.kernels.triton.graphs", reason="needs triton")

SHARES_MEMORY = graphs._shares_memory.__wrapped__


class Calls:
    """Counts what a key's launches and its graph are asked for."""

    def __init__(self, monkeypatch):
        self.log = []
        self.capturing = False
        monkeypatch.setattr(graphs, "_kept", graphs._Kept())
        monkeypatch.setattr(graphs, "captured", self.captured)
        monkeypatch.setattr(graphs, "_shares_memory", lambda: True)
        monkeypatch.setattr("loka.core.recording._eager", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def captured(self, launches, device, target):
        launches("capture")
        return self

    def launch(self, stream):
        self.log.append(("graph", stream))

    def __call__(self, *key, stream="stream"):
        self.log.clear()
        graphs.launch_kept(key, lambda where: self.log.append(("plain", where)), stream, 0)
        return list(self.log)


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


PLAIN, CAPTURED, REPLAYED = [("plain", "stream")], [("plain", "capture"), ("graph", "stream")], [("graph", "stream")]


def test_a_key_is_captured_when_it_comes_again(calls):
    assert [calls(1), calls(2), calls(1), calls(1), calls(2)] == [PLAIN, PLAIN, CAPTURED, REPLAYED, CAPTURED]


def test_turned_off_launches_are_single_and_graphs_destroyed(calls):
    calls(1), calls(1)
    eager_graphs(False)
    assert [calls(1), calls(1)] == [PLAIN] * 2
    assert not graphs._kept.graphs, "what was kept is destroyed"
    eager_graphs()
    assert calls(1) == CAPTURED


def test_while_somebody_may_wait_for_the_device_nothing_is_captured_and_kept_graphs_run(calls, monkeypatch):
    assert [calls(1), calls(1), calls(2)] == [PLAIN, CAPTURED, PLAIN]
    monkeypatch.setattr(graphs, "may_capture_eagerly", lambda stream: False)
    assert [calls(1), calls(2), calls(2)] == [REPLAYED, PLAIN, PLAIN]
    monkeypatch.setattr(graphs, "may_capture_eagerly", lambda stream: True)
    assert calls(2) == CAPTURED


def test_in_a_capture_of_the_caller_launches_are_plain(calls):
    for _ in range(3):
        calls(1)
    calls.capturing = True
    assert [calls(1), calls(2), calls(2)] == [PLAIN] * 3
    calls.capturing = False
    assert [calls(1), calls(2)] == [REPLAYED, PLAIN], "what was launched there was not seen here"


def test_addresses_that_wander_are_not_captured_for_ever(calls):
    found = [step for key in range(1000) for step in (calls(key), calls(key))]
    assert found.count(CAPTURED) == graphs._AT_ONCE
    for _ in range(graphs._PAID_BY - 1):
        assert calls(0) == REPLAYED
    assert [calls(999), calls(999)] == [PLAIN] * 2
    assert calls(0) == REPLAYED
    assert calls(998) == PLAIN, "keys are remembered from here on"
    assert [calls(998), calls(998), calls(998)] == [CAPTURED, REPLAYED, REPLAYED], "launches of kept graphs pay for it"


def test_the_longest_unused_makes_room(calls, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 3)
    for key in (1, 2, 3):
        calls(key), calls(key)
    assert calls(1) == REPLAYED
    calls(4)
    assert calls(4) == CAPTURED
    assert [calls(1), calls(3), calls(2)] == [REPLAYED, REPLAYED, CAPTURED]


def test_what_the_driver_refuses_is_launched_one_by_one(calls, monkeypatch):
    def refused(launches, device, target):
        raise RuntimeError("cuGraphInstantiate: out of memory (2)")

    calls(1), calls(1)
    monkeypatch.setattr(graphs, "captured", refused)
    calls(2)
    with pytest.warns(UserWarning, match=r"one by one .* out of memory"):
        assert calls(2) == PLAIN
    assert [calls(2), calls(1)] == [PLAIN, REPLAYED]


def test_a_graph_whose_first_launch_fails_is_not_kept(calls, monkeypatch):
    def launch(stream):
        raise RuntimeError("cuGraphLaunch: out of memory (2)")

    calls(1)
    monkeypatch.setattr(calls, "launch", launch)
    with pytest.warns(UserWarning, match=r"one by one .* out of memory"):
        assert calls(1) == [("plain", "capture"), *PLAIN]
    assert calls(1) == PLAIN


@pytest.mark.parametrize(
    ("backend", "uncached", "third"),
    [
        ("native", None, REPLAYED),
        ("native", "1", PLAIN),
        ("native", "", PLAIN),
        ("cudaMallocAsync", None, PLAIN),
        ("pluggable", None, PLAIN),
    ],
)
def test_without_pools_of_torch_s_allocator_nothing_is_captured(calls, monkeypatch, backend, uncached, third):
    monkeypatch.setattr(graphs, "_shares_memory", SHARES_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    if uncached is not None:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", uncached)
    calls(1), calls(1)
    assert calls(1) == third


def test_another_thread_s_capture_is_not_waited_for(calls, monkeypatch):
    monkeypatch.setattr(graphs, "captured", lambda launches, device, target: None)
    assert [calls(1), calls(1), calls(1)] == [PLAIN] * 3


def test_a_signal_in_the_middle_may_launch(calls):
    """Its handler runs between any two steps of the interpreter, those under the lock included."""
    found = []

    class Key:
        def __hash__(self):
            if not found:  # the lock is held: the graph of this key is being looked up
                found.append(None)
                graphs.launch_kept((2,), found.append, "handler", 0)
            return 1

    thread = threading.Thread(target=calls, args=(Key(),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert found == [None, "handler"]


def made(shape, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=dtype)


FAST = ("torch_fast:rowwise_e4m3_pow2", "torch_fast:rowwise_e4m3_pow2", "torch:rowwise_e4m3_pow2")
MIXED = ("torch:tensorwise_e4m3", "torch_fast:tensorwise_e5m2", "torch:rowwise_e4m3")
HOT = ("torch:rowwise_e4m3_hot32", "torch:rowwise_e4m3", "torch:rowwise_e4m3")


def site(names=FAST, width=256):
    health = torch.zeros(3, 3, dtype=torch.int64, device="cuda")
    weight = made((width, width), torch.float32, seed=1)
    hot = torch.arange(32, device="cuda") if "hot" in names[0] else None

    def step(x, dy):
        with torch.no_grad():
            return site_ops.layer_pass(x, weight, dy, health, names, hot)

    return step, health


@pytest.fixture
def fresh(monkeypatch):
    kept = graphs._Kept()
    monkeypatch.setattr(graphs, "_kept", kept)
    monkeypatch.setattr("loka.core.recording._eager", True)
    return kept


@pytest.mark.gpu
@pytest.mark.parametrize("names", [FAST, MIXED, HOT])
def test_on_a_gpu_results_are_those_of_single_launches(fresh, monkeypatch, names):
    """Other rows in the same memory; what somebody holds stays as it is."""
    torch.cuda.empty_cache()  # addresses wander where other tests left much memory of these sizes
    step, health = site(names)
    x, dy = made((128, 256)), made((128, 256), seed=2)
    held = []
    for turn in range(60):  # how often addresses come again is the allocator's
        x.copy_(made((128, 256), seed=turn)), dy.copy_(made((128, 256), seed=-turn))
        found = step(x, dy)
        if turn % 10 == 9:
            held.append((found, [tensor.clone() for tensor in found]))
    assert fresh.launches > 10
    assert all(torch.equal(a, b) for found, before in held for a, b in zip(found, before, strict=True))
    assert health[:, 0].tolist() == [60, 60, 60]
    monkeypatch.setattr(graphs, "_captured", lambda launches, device, target: None)
    monkeypatch.setattr(graphs, "_kept", graphs._Kept())
    for kept, plain in zip(found, step(x, dy), strict=True):
        assert torch.equal(kept, plain)
    monkeypatch.setattr(site_ops, "can_record", lambda run, device: False)
    for cache in (site_ops._forward_of, site_ops._backward_of):
        cache.cache_clear()
    for kept, apart in zip(found, step(x, dy), strict=True):
        assert torch.equal(kept, apart)
    for cache in (site_ops._forward_of, site_ops._backward_of):
        cache.cache_clear()


@pytest.mark.gpu
def test_on_a_gpu_a_model_trains_alike(fresh, monkeypatch):
    """Weights after ten steps, accumulation and a frozen layer included, bit for bit; and which kernels ran."""

    def trained():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512) for _ in range(3)]
        model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).cuda()
        layers[1].weight.requires_grad_(False)
        for layer in layers:
            convert_layer(layer, FAST)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for turn in range(10):
            for rows in (192, 192, 208):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(made((rows, 512), seed=turn)).square().mean()
                loss.backward()
            optimizer.step(), optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    reset_kernel_runs()
    kept, ran = trained(), kernel_runs()
    assert fresh.launches > 20
    assert ran == {(FAST[0], "output"): 90, (FAST[1], "grad_input"): 60, (FAST[2], "grad_weight"): 60}
    monkeypatch.setattr(graphs, "_captured", lambda launches, device, target: None)
    monkeypatch.setattr(graphs, "_kept", graphs._Kept())
    assert all(torch.equal(a, b) for a, b in zip(kept, trained(), strict=True))


@pytest.mark.gpu
def test_on_a_gpu_workspaces_that_torch_lets_go_of_are_not_given_to_others(fresh):
    """What cuBLAS works in while a kept graph runs is nobody else's memory, even where torch frees it."""
    step, _ = site(MIXED, width=2048)
    x, dy = made((2048, 2048)), made((2048, 2048), seed=2)
    expected = [tensor.clone() for tensor in step(x, dy)]
    for _ in range(6):
        step(x, dy)
    before = fresh.launches
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
    for _ in range(12):
        assert all(torch.equal(a, b) for a, b in zip(step(x, dy), expected, strict=True))
    assert fresh.launches > before
    assert all((other == 7).all() for other in others)


@pytest.mark.gpu
def test_on_a_gpu_a_nan_behind_a_kept_graph_is_seen(fresh):
    step, health = site()
    x, dy = made((128, 256)), made((128, 256), seed=2)
    for _ in range(6):
        step(x, dy)
    assert fresh.launches
    x[3, 3] = float("nan")
    assert torch.isnan(step(x, dy)[0][3]).all()
    assert health[0, 1] == 1


@pytest.mark.gpu
def test_on_a_gpu_a_caller_s_graph_holds_the_launches_themselves(fresh):
    step, _ = site()
    x, dy = made((128, 256)), made((128, 256), seed=2)
    for _ in range(6):
        expected = step(x, dy)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = step(x, dy)
    for seed in range(3):
        x.copy_(made((128, 256), seed=seed))
        graph.replay()
        expected = step(x, dy)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_threads_and_streams_do_not_mix_their_results(fresh):
    """Threads draw random numbers and train meanwhile, on streams of their own: a capture hinders none of them."""
    failed = []

    def train(seed):
        try:
            step, _ = site(MIXED)
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                x, dy = made((96, 256), seed=seed), made((96, 256), seed=seed + 10)
                expected = [tensor.clone() for tensor in step(x, dy)]
                for _ in range(200):
                    torch.nn.functional.dropout(x)
                    found = step(x, dy)
                    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                    del found
            stream.synchronize()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed
    assert fresh.launches > 100


@pytest.mark.gpu
def test_on_a_gpu_a_graph_that_makes_room_ends_its_work(fresh, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 1)
    step, _ = site()
    pairs = [(made((rows, 256)), made((rows, 256), seed=2)) for rows in (64, 4096)]
    expected = [[tensor.clone() for tensor in step(*pair)] for pair in pairs]
    for _ in range(8):
        for pair, right in zip(pairs, expected, strict=True):
            found = step(*pair)
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert fresh.captures > 2


UNASKED = """
import gc, sys, threading, torch
from loka.kernels.triton import graphs
from sites import convert_layer
names = ("torch_fast:rowwise_e4m3_pow2", "torch_fast:rowwise_e4m3_pow2", "torch:rowwise_e4m3_pow2")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
for layer in model:
    convert_layer(layer, names)
x = torch.randn(1024, 512, device="cuda")
stop = threading.Event()
watch = threading.Thread(target=stop.wait) if sys.argv[1] == "watched" else None
if watch:
    watch.start()
gc.disable()
for turn in range(40):
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    y.square().mean().backward()
    model.zero_grad()
    del y
    if turn == 20:
        before = torch.cuda.memory_allocated()
print(graphs._kept.captures, graphs._kept.launches, torch.cuda.memory_allocated() - before)
stop.set()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["alone", "watched"])
def test_on_a_gpu_an_eager_loop_is_captured_unasked_where_no_other_thread_runs(how):
    """In a process of its own: pytest's workers have threads. Nothing lives longer for it, without a collector too."""
    ran = subprocess.run(
        [sys.executable, "-c", UNASKED, how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    captures, launches, more = map(int, ran.stdout.split())
    assert more == 0
    assert (captures == launches == 0) if how == "watched" else (8 <= captures <= 32 and launches >= 200)
