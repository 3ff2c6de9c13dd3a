"""How much of a step CUDA graphs hold: all of it, all but its tables, its blocks one by one, or nothing."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from loka.core.device import has_graphs
from loka.distributed.dense_sharding import is_sharded
from loka.distributed.tables.sharded_tables import sharded_modules
from loka.nn.fsdp_units import share_unit
from loka.nn.unwrap import device_of
from loka.train.config import TrainConfig
from loka.train.steps.graphed import GATHERS, REPLICAS
from loka.zoo import dense_part

_BY_BLOCK = "what is compiled of them is CUDA graphs of its own"


@dataclass(frozen=True)
class Extent:
    """`part`: what one graph holds, `beside`: whether the model's tables are beside it; or, in `why_no_graph`, why
    there is none. `by_block`: whether each compiled block is graphs of its own then."""

    part: nn.Module
    beside: bool = False
    why_no_graph: str | None = None
    by_block: bool = False

    @property
    def reason(self) -> str | None:
        """What to tell of a step that is not one graph."""
        return f"{self.why_no_graph}; {_BY_BLOCK}" if self.by_block else self.why_no_graph


def extent_of(model: nn.Module, optimizers: Collection[str], config: TrainConfig) -> Extent:
    """Of a step that is asked to be a graph; `optimizers` are the names of `build_optimizers`."""
    why = _why_no_graph(model, optimizers, config)
    if why is None and "sparse" in optimizers:
        try:
            with _without_hooks(model):
                part = dense_part(model)
            share_unit(part, model)
            return Extent(part, beside=True)
        except ValueError as error:
            why = f"its tables have sparse gradients, whose sizes are known on the device only, and {error}"
    by_block = has_graphs(device_of(model)) and replays_blocks(config, sharded=is_sharded(model))
    return Extent(model, why_no_graph=why, by_block=why is not None and by_block)


def replays_blocks(config: TrainConfig, *, sharded: bool) -> bool:
    """Whether each block of a step that is no graph may be graphs of its own; `sharded`: by FSDP2.

    FSDP2 gathers weights at other addresses each time: two H100s recorded anew in every step. What a graph
    returned, gradients too, lasts to the next forward, which of parts of a batch comes too soon.
    """
    return config.step == "graph" and config.accumulate == 1 and not sharded


def _why_no_graph(model: nn.Module, optimizers: Collection[str], config: TrainConfig) -> str | None:
    """But for tables that cannot be put beside one."""
    device = device_of(model)
    if not has_graphs(device):
        return f"CUDA graphs need a CUDA device; the model is on {device}"
    replicas = isinstance(model, nn.parallel.DistributedDataParallel)
    if not replicas and sharded_modules(model):
        return "TorchRec exchanges embeddings while forward and backward run, which is not captured"
    if (replicas or is_sharded(model)) and not config.capture_collectives:
        return REPLICAS if replicas else GATHERS
    if replicas and "sparse" in optimizers:
        return "its tables have sparse gradients, whose sizes are known on the device only"
    if (replicas or is_sharded(model)) and config.gradients != "hp":
        return f"gradients in {config.gradients} travel by code of ours, which is not captured"
    if not replicas and "dense" not in optimizers:
        return "the model has nothing but tables, whose sparse gradients no graph can hold"
    return None


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """But for FSDP2's and what stands around them: without those its root would not be gathered."""
    if is_sharded(model):
        yield
        return
    kept = {name: vars(model)[name] for name in vars(model) if name.endswith("_hooks")}
    for name, hooks in kept.items():
        vars(model)[name] = type(hooks)()
    try:
        yield
    finally:
        vars(model).update(kept)
