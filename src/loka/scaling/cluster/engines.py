"""One training step as torch's own engine runs it, for a rank of many that are not there.

The model is wrapped in DistributedDataParallel or by `fully_shard`, over torch's fake process group and with
fake tensors, and a step runs forward and backward. What is recorded is in the order in which the engine
issued it: GEMMs by shape, bytes of the ops between them, and every collective with its parameters.

Tables (nn.Embedding, nn.EmbeddingBag) are left to neither engine, as TorchRec shards them.
"""

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.core.exceptions import LokaError, first_line, truncated
from loka.core.signature import child_path
from loka.distributed.gradient_wire import done_with
from loka.distributed.tables.lookups import TABLES
from loka.graph.flops import flop_formulas
from loka.nn.fsdp_units import sharded_parameters
from loka.nn.unwrap import class_name
from loka.scaling.inputs import arguments, fake_model

Engine = Literal["ddp", "fsdp2", "hsdp"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

TRACED, REPLICAS = 8, 2
"""Ranks of the traced step; of HSDP's, in each of its replicas. Order and parameters of collectives do not
depend on them, padding does, and is checked against the trace (wires.py)."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class Param:
    """A parameter that an engine holds, whole. `itemsize`: bytes of an element; `trained`: it gets a gradient."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    trained: bool = True

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Matmul:
    """`count` products [m, k] @ [k, n]; m, n and k are 0 where the op is of another kind. `flops` of all."""

    backward: bool
    m: int
    n: int
    k: int
    count: int
    flops: float


@dataclass(frozen=True)
class Moved:
    """Bytes that other ops read and write."""

    size: float


@dataclass(frozen=True)
class Gathered:
    """An all-gather. `size`: bytes of what it made, at TRACED ranks."""

    backward: bool
    params: tuple[Param, ...]
    size: int


@dataclass(frozen=True)
class CopiedOut:
    pass


@dataclass(frozen=True)
class Reduced:
    """A bucket of DDP, or a unit of FSDP2. `size`: bytes of what was reduced, at TRACED ranks, `itemsize` an
    element: DDP's buckets are in the gradients' dtype, from which a hook makes bf16."""

    params: tuple[Param, ...]
    size: int
    itemsize: int


@dataclass(frozen=True)
class Replicated:
    """HSDP's all-reduce of a unit's shard across replicas; numbers as of `Reduced`."""

    params: tuple[Param, ...]
    size: int
    itemsize: int


Event = Matmul | Moved | Gathered | CopiedOut | Reduced | Replicated


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """`units`: paths that were sharded each for itself, besides the root. `tables`: rows and width of each,
    left out; `buffers`: bytes of them. `saved`: bytes that forward keeps for backward, parameters apart."""

    engine: Engine
    events: tuple[Event, ...]
    units: tuple[str, ...]
    params: tuple[Param, ...]
    tables: tuple[tuple[int, int], ...]
    buffers: int
    saved: int = 0

    @property
    def trained(self) -> tuple[Param, ...]:
        return trained(self.params)


def trained(params: Sequence[Param]) -> tuple[Param, ...]:
    return tuple(p for p in params if p.trained)


def traced_step(
    model: nn.Module, batch: Any, *, mode: FakeTensorMode, engine: Engine, units: Sequence[str] = ()
) -> EngineStep:
    """A step of `model`, which holds fake tensors of `mode` and is left as it is, on a batch of such.

    Args:
        units: patterns of paths that FSDP2 shards each for itself; empty: every layer of the outermost
            ModuleLists and Sequentials.

    Raises:
        LokaError: there is a process group already, no module has such a path, or the model does not run.
    """
    inner = fake_model(model, mode)
    run = _ddp if engine == "ddp" else _fsdp2
    paths = () if engine == "ddp" else _units(inner, units)
    log = _Log(replicated=engine == "hsdp")
    with _fake_group(TRACED * (REPLICAS if engine == "hsdp" else 1)):
        try:
            run(inner, _step(batch, mode), log, mode, paths)
        except LokaError:
            raise
        except Exception as error:  # a model's own code raises what it likes, and so do the engines
            raise LokaError(
                f"{class_name(model)} does not run under {engine} without numbers",
                why=[first_line(error)[:220]],
                way_out="a forward that does not look at values; for FSDP2, name units whose forward is "
                "called, by --unit",
            ) from error
    ignored = _ignored(inner)
    return EngineStep(
        engine=engine,
        events=tuple(log.events),
        units=paths,
        params=tuple(one for name, one in _params(model).items() if name not in ignored),
        tables=tuple((p.shape[0], p.shape[1]) for n, p in model.named_parameters() if n in ignored),
        buffers=_bytes(list(model.buffers())),
        saved=sum(storage.nbytes() for storage in log.saved.values()),
    )


@contextlib.contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    if dist.is_initialized():
        raise LokaError(
            "there is a process group already, and a step is traced in one that is not real",
            way_out="ask in a process of its own",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Log:
    events: list[Event] = field(default_factory=list)
    saved: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    backward: bool = False
    replicated: bool = False

    def save(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x if x._base is None else x._base, nn.Parameter):
            storage = x.untyped_storage()
            self.saved[storage._cdata] = storage  # which keeps its number from being another's
        return x


class _Watch(TorchDispatchMode):
    def __init__(self, log: _Log) -> None:
        super().__init__()
        self.log, self._flops = log, flop_formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            self.log.events.append(CopiedOut())
        if self.log.replicated and func is torch.ops.c10d.allreduce_.default:
            last = next((e for e in reversed(self.log.events) if isinstance(e, Reduced)), None)
            shard = args[0][0]  # a model's own all-reduce has other bytes, which `check_traced` refuses
            params = () if last is None else last.params
            self.log.events.append(Replicated(params, _bytes(shard), shard.element_size()))
        if func._overloadpacket in self._flops:
            flops = float(self._flops[func._overloadpacket](*args, **kwargs, out_val=out))
            self.log.events.append(_matmul(func, args, flops, self.log.backward))
        elif func.namespace in ("aten", "prims", "fsdp") and not func.is_view:
            size = _bytes((args, kwargs)) + _bytes(out)
            # A lookup takes the whole table for its argument, and its dense gradient is as large.
            lookup = func._overloadpacket.__name__.lstrip("_").startswith("embedding")
            if size and func._overloadpacket not in _MADE and not lookup:
                _add_moved(self.log, size)
        return out


_MADE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.detach, _aten.set_}
_GEMMS = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}


def _matmul(func: Any, args: Any, flops: float, backward: bool) -> Matmul:
    first = _GEMMS.get(func._overloadpacket)
    if first is None:
        return Matmul(backward, 0, 0, 0, 1, flops)
    *count, m, k = args[first].shape
    return Matmul(backward, m, args[first + 1].shape[-1], k, count[0] if count else 1, flops)


def _params(model: nn.Module) -> dict[str, Param]:
    held = model.named_parameters()
    return {name: Param(name, tuple(p.shape), p.element_size(), p.requires_grad) for name, p in held}


def _bytes(values: Any) -> int:
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in found)


def _add_moved(log: _Log, size: float) -> None:
    if log.events and isinstance(log.events[-1], Moved):
        size += log.events.pop().size  # type: ignore[union-attr]
    log.events.append(Moved(size))


def _step(batch: Any, mode: FakeTensorMode) -> Callable[[nn.Module, _Log], None]:
    positional, named = arguments(batch)

    def run(wrapped: nn.Module, log: _Log) -> None:
        log.events.clear()
        for parameter in wrapped.parameters():  # an engine before this one may have left a table's
            parameter.grad = None
        mixed = any(p.dtype == torch.float32 for p in wrapped.parameters())
        with mode, _Watch(log), torch.autocast("cpu", torch.bfloat16, enabled=mixed), torch.enable_grad():
            log.backward = False
            log.saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(log.save, lambda x: x):
                out = wrapped(*positional, **named)
            found = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            if not found:
                raise LokaError(
                    "what the model returns wants no gradient, so there is no backward",
                    way_out="a model in training, that returns logits or a loss",
                )
            loss = sum((x.float().sum() for x in found[1:]), start=found[0].float().sum())
            log.backward = True
            loss.backward()

    return run


def _ignored(model: nn.Module) -> set[str]:
    return {
        child_path(path, name)
        for path, module in model.named_modules()
        if isinstance(module, TABLES)
        for name, _ in module.named_parameters(recurse=False)
    }


_Run = Callable[[nn.Module, _Log], None]


def _ddp(model: nn.Module, run: _Run, log: _Log, mode: FakeTensorMode, units: tuple[str, ...]) -> None:
    """The second step: DDP orders its buckets anew by the first one's backward."""
    from torch.nn.parallel import DistributedDataParallel

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, [*_ignored(model), *(name for name, _ in model.named_buffers())])
    with mode:
        wrapped = DistributedDataParallel(model, init_sync=False)

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        params = tuple(Param(names[id(p)], tuple(p.shape)) for p in bucket.parameters())
        buffer = bucket.buffer()
        log.events.append(_reduced(params, buffer))
        return done_with(buffer)

    wrapped.register_comm_hook(None, hook)
    run(wrapped, log)
    for parameter in model.parameters():
        parameter.grad = None
    # By the next forward it would do so under fake tensors, whose numbers it reads. Buckets are real here and
    # never written, so they take addresses and no memory.
    wrapped.reducer._rebuild_buckets()
    run(wrapped, log)


def _fsdp2(model: nn.Module, run: _Run, log: _Log, mode: FakeTensorMode, units: tuple[str, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (TRACED,))
    if log.replicated:
        mesh = init_device_mesh("cpu", (REPLICAS, TRACED), mesh_dim_names=("replicate", "shard"))
    full = _params(model)
    left = _ignored(model)
    ignored = {parameter for name, parameter in model.named_parameters() if name in left}
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with mode:
        for path in (*units, ""):
            fully_shard(model.get_submodule(path), mesh=mesh, mp_policy=bf16, ignored_params=ignored)
        by_unit: dict[str, list[Param]] = {}
        for one in sharded_parameters(model):
            by_unit.setdefault(one.unit, []).append(full[one.name])
    for path, params in by_unit.items():
        unit: Any = model.get_submodule(path)
        gather, reduce = _counted(log, tuple(params))
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    run(model, log)


def _counted(log: _Log, params: tuple[Param, ...]) -> tuple[Any, Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class Gather(DefaultAllGather):
        def __call__(self, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            size = output_tensor.numel() * output_tensor.element_size()
            log.events.append(Gathered(log.backward, params, size))
            return super().__call__(output_tensor, *args, **kwargs)

    class Reduce(DefaultReduceScatter):
        def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            log.events.append(_reduced(trained(params), input_tensor))
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    return Gather(), Reduce()


def _reduced(params: tuple[Param, ...], buffer: torch.Tensor) -> Reduced:
    return Reduced(params, buffer.numel() * buffer.element_size(), buffer.element_size())


def _fits(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted))


def _units(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    held = {path: m for path, m in model.named_modules() if path and any(True for _ in m.parameters())}
    if patterns:
        for pattern in patterns:
            if not any(_fits(path, pattern) for path in held):
                raise LokaError(
                    f"no module with parameters has a path like {pattern!r}",
                    why=[f"there are {', '.join(truncated(list(held), 12))}"],
                    way_out="a path or pattern such as 'layers.*', or none, for the layers of all lists",
                )
        return tuple(path for path in held if any(_fits(path, one) for one in patterns))
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(path == outer or path.startswith(f"{outer}.") for outer in found):
            continue
        children = (child_path(path, name) for name, _ in module.named_children())
        found += [child for child in children if child in held and not isinstance(held[child], TABLES)]
    return tuple(found)
