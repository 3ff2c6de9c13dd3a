"""Collectives that are told before training are those that real ranks send: the same ones, in the same order,
of the same bytes."""

import contextlib
import itertools
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gather_jobs import shard
from ranks import on_ranks
from sweeps import sweep
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from towers import loss_of, plan_of, rows, tower, uneven

import loka
from loka.core.exceptions import LokaError
from loka.distributed import GradientWire, fp8_all_gather, send_gradients
from loka.distributed.gradient_codec import codec_named
from loka.scaling.cluster import engines, wires
from loka.scaling.cluster.compute import layers_in_fp8, placed
from loka.scaling.cluster.engines import ENGINES, Matmul, Reduced, Replicated, traced_step
from loka.scaling.cluster.pricing import Formats, step_of
from loka.scaling.cluster.wires import DECODED, ENCODED, check_traced, gather_wire, reduce_wires
from loka.scaling.inputs import fake_batch, fake_mode, fake_model

RANKS, REPLICAS = 2, 2  # of hsdp, in each replica
SIDES = {"uneven": (24, 100, 33, 4, 40), "buckets": (64, 700, 900, 1100, 8)}  # the second fills two buckets
FORMATS = [
    ("ddp", Formats("-", "bf16")),
    ("ddp", Formats("-", "int8")),
    ("ddp", Formats("-", "e4m3")),
    ("fsdp2", Formats("bf16", "bf16")),
    ("fsdp2", Formats("bf16", "int8")),
    ("fsdp2", Formats("fp8", "bf16")),
    ("fsdp2", Formats("fp8", "e4m3")),
    ("hsdp", Formats("bf16", "bf16")),
    ("hsdp", Formats("bf16", "int8")),
    ("hsdp", Formats("fp8", "bf16")),
]
CASES = [  # the plan that gathers in FP8 is of the uneven tower
    (name, engine, formats)
    for engine, formats in FORMATS
    for name in SIDES
    if formats.gather != "fp8" or name == "uneven"
]
_OPS = {
    "c10d.allreduce_": "all_reduce",
    "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.alltoall_base_": "all_to_all",
}


class Sent(TorchDispatchMode):
    """Collectives, each with the bytes of its larger buffer and the ranks of its group."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            largest = max(x.numel() * x.element_size() for x in leaves)
            name = str(func._overloadpacket)
            group = next(x for x in args if isinstance(x, torch.ScriptObject))  # the operation is behind it
            ranks = dist.ProcessGroup.unbox(group).size()
            self.found.append((_OPS.get(name, name), largest, ranks))
        return func(*args, **(kwargs or {}))


def noting(function, op, found):
    def noted(*args, **kwargs):
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        groups = [x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)]
        ranks = groups[0].size() if groups else dist.get_world_size()
        found.append((op, max(x.numel() * x.element_size() for x in leaves), ranks))
        return function(*args, **kwargs)

    return noted


@contextlib.contextmanager
def called():
    """The same by the functions that are called: under a mode, backward of weights in FP8 refuses to run."""
    found = []
    ops = {
        "all_reduce": "all_reduce",
        "all_gather_single": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_single": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }
    with contextlib.ExitStack() as stack:
        for name in ops.keys() & vars(dist).keys():
            stack.enter_context(mock.patch.object(dist, name, noting(getattr(dist, name), ops[name], found)))
        yield found


def in_bf16(state, bucket):
    """torch's hook, which DDP refuses by its name where there is no NCCL."""
    return bf16_compress_hook(state, bucket)


@dataclass(frozen=True)
class Job:
    plan: loka.Plan

    def __call__(self, rank, folder):
        found = {}
        for name, engine, formats in CASES:
            if (engine == "hsdp") == (dist.get_world_size() == RANKS):
                continue
            found[f"{name} {engine} {formats}"] = self.step(engine, formats, SIDES[name], rank)
        return found

    def step(self, engine, formats, sides, rank):
        model = tower(*sides)
        wire = GradientWire(scatter=formats.gradients, gather=formats.gradients)
        if engine == "ddp":
            model = DistributedDataParallel(model)
            if formats.gradients == "bf16":
                model.register_comm_hook(None, in_bf16)
        else:
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            if formats.gather == "fp8":
                model = loka.convert(model, self.plan)
            model = shard(model, group=RANKS if engine == "hsdp" else 0, mp_policy=mixed)
        gathering = fp8_all_gather(model, self.plan) if formats.gather == "fp8" else None
        if formats.gradients != "bf16":
            send_gradients(model, wire)
        for _ in range(3):  # in the second, DDP orders its buckets anew and tells the others of it
            model.zero_grad()
            before, mode = wire.sent_bytes, Sent()
            # Autocast changes which gradient comes first, and so what is in DDP's buckets.
            cast = torch.autocast("cpu", torch.bfloat16, enabled=engine == "ddp")
            with cast, called() if gathering else mode as sent:
                loss_of(lambda x: model(x).float(), *rows(0, rank, sides[0])).backward()
        return {
            "sent": sent if gathering else mode.found,
            "fp8": sorted(gathering.in_fp8) if gathering else [],
            "to others": wire.sent_bytes - before,
        }


def traced(engine, sides):
    mode = fake_mode()
    model = fake_model(tower(*sides), mode)
    return traced_step(model, fake_batch(torch.randn(4, sides[0]), mode, rows=24), mode=mode, engine=engine)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    job, folder = Job(plan_of(uneven)), tmp_path_factory.mktemp("ranks")
    one, *more = on_ranks(job, RANKS, folder)
    first, *others = on_ranks(job, RANKS * REPLICAS, folder)
    return [{**one, **first}, *more, *others]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine", "formats"), CASES)
def test_bytes_and_order_are_those_of_real_ranks(real, name, engine, formats):
    key = f"{name} {engine} {formats}"
    step = traced(engine, SIDES[name])
    ranks, group = (RANKS * REPLICAS, RANKS) if engine == "hsdp" else (RANKS, 0)
    fp8 = frozenset(real[0][key]["fp8"])
    told = step_of(step, placed(step, ()), ranks, formats=formats, in_fp8=fp8, group=group).wires
    assert len(told) == len(real[0][key]["sent"]) > 0
    for rank in (rank for rank in real if key in rank):
        assert [(wire.op, int(wire.size), wire.ranks or ranks) for wire in told] == rank[key]["sent"]
        if formats.gradients != "bf16":  # of which LoKA keeps count itself: what went to the other rank
            sent = sum(w.size for w in told if w.op == "all_to_all" or (engine == "ddp" and w.op == "all_gather"))
            assert rank[key]["to others"] == sent * (RANKS - 1) / RANKS


def test_weights_in_fp8_are_those_that_the_plan_lets_travel(real):
    found = loka.scale(uneven(), torch.randn(4, 24), batch_size=8192)
    names = {f"{layer.path}.weight" for layer in layers_in_fp8(found, plan_of(uneven))}
    assert names == set(real[0]["uneven fsdp2 Formats(gather='fp8', gradients='bf16')"]["fp8"])
    assert names
    other = plan_of(uneven, "emulated:tensorwise_e4m3")
    assert not layers_in_fp8(found, other)


@pytest.mark.parametrize("ranks", sweep([2, 3, 7, 64], [3]))
def test_padding_is_the_engines_at_any_number_of_ranks(ranks, monkeypatch):
    for module in (engines, wires):
        monkeypatch.setattr(module, "TRACED", ranks)
    for engine in ENGINES:
        check_traced(traced(engine, SIDES["uneven"]))


def test_bytes_that_are_not_the_engines_are_refused():
    step = traced("fsdp2", SIDES["uneven"])
    first = next(place for place, event in enumerate(step.events) if isinstance(event, Reduced))
    events = list(step.events)
    events[first] = Reduced(events[first].params[:-1], events[first].size, 2)
    own = [Replicated((), 8, 4)]  # an all-reduce of the model's
    for wrong in (events, own):
        with pytest.raises(LokaError, match="were counted"):
            check_traced(replace(step, events=tuple(wrong)))


@pytest.mark.parametrize("engine", ENGINES)
def test_gemms_stand_where_the_engine_runs_them(engine):
    """Backward: grad_input and grad_weight of the last layer first; its bucket or unit behind them."""
    step = traced(engine, SIDES["buckets"])
    products = [(e.backward, e.m, e.n, e.k) for e in step.events if isinstance(e, Matmul)]
    sides = list(itertools.pairwise(SIDES["buckets"]))
    assert products[: len(sides)] == [(False, 24, out, wide) for wide, out in sides]
    assert products[len(sides) : len(sides) + 2] == [(True, 24, 1100, 8), (True, 8, 1100, 24)]
    kinds = [type(event).__name__ for event in step.events]
    assert kinds.index("Reduced") > kinds.index("Matmul", kinds.index("Matmul") + len(sides))
    if engine == "fsdp2":
        assert step.units == ("0", "2", "4", "6")
        assert kinds.count("Gathered") == kinds.count("CopiedOut") == 2 * 4 - 1 + 1


def test_units_by_pattern_and_tables():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(50, 16, sparse=True)
            self.top = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 1)])

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.top:
                x = layer(x)
            return x

    mode = fake_mode()
    batch = fake_batch(torch.zeros(4, 3, dtype=torch.long), mode, rows=16)
    model = fake_model(Tables(), mode)
    for engine in ENGINES:
        step = traced_step(model, batch, mode=mode, engine=engine, units=["top.0"])
        assert step.tables == ((50, 16),)
        assert {p.name for p in step.params} == {"top.0.weight", "top.0.bias", "top.1.weight", "top.1.bias"}
        reduced = [p.name for event in step.events if isinstance(event, Reduced) for p in event.params]
        assert sorted(reduced) == sorted(p.name for p in step.params)
    assert step.units == ("top.0",)
    with pytest.raises(LokaError, match=r"no module .* 'towers"):
        traced_step(model, batch, mode=mode, engine="fsdp2", units=["towers.*"])
    deep = fake_model(nn.Sequential(nn.Sequential(nn.Linear(16, 8), nn.ReLU()), nn.Linear(8, 1)), mode)
    step = traced_step(deep, fake_batch(torch.zeros(4, 16), mode, rows=16), mode=mode, engine="fsdp2", units=["*"])
    assert step.units == ("0", "1"), "and not what lies in them"


def test_the_process_group_is_given_back_and_one_that_stands_is_left_alone(tmp_path):
    traced("ddp", SIDES["uneven"])
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        with pytest.raises(LokaError, match="a process group already"):
            traced("ddp", SIDES["uneven"])
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_what_does_not_run_without_numbers_is_told():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) * x.max().item()

    mode = fake_mode()
    model, batch = fake_model(Looks(), mode), fake_batch(torch.randn(4, 4), mode, rows=8)
    with pytest.raises(LokaError, match="does not run under ddp without numbers"):
        traced_step(model, batch, mode=mode, engine="ddp")
    assert not dist.is_initialized()


class Moved(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            leaves = tree_leaves((args, kwargs, out))
            self.size += sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
        return out


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_what_codecs_read_and_write(name):
    codec, x = codec_named(name), torch.randn(8, 128 * 100)
    with Moved() as encode:
        code = codec.encode(x)
    with Moved() as decode:
        codec.decode(code)
    assert ENCODED[name] == pytest.approx(encode.size / x.numel(), abs=1)
    assert DECODED[name] == pytest.approx(decode.size / x.numel(), abs=1)


def test_eight_bits_send_fewer_bytes():
    step = traced("fsdp2", SIDES["uneven"])
    names = frozenset(p.name for p in step.params if len(p.shape) == 2)
    matrices = [p for p in step.params if len(p.shape) == 2]
    assert gather_wire(matrices, 8, in_fp8=names).size * 2 == gather_wire(matrices, 8).size
    wide = [engines.Param("w", (1024, 1024))]
    (low,), (bf16,) = (reduce_wires("fsdp2", wide, 8, gradients=g) for g in ("int8", "bf16"))
    assert low.size == bf16.size * 0.5 * (1 + 4 / 128)
