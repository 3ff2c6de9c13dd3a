"""What a GPU holds in a step: an estimate, from the traced step."""

from collections.abc import Sequence

from loka.scaling.cluster.engines import EngineStep, Gathered, Param, trained
from loka.scaling.cluster.wires import gather_wire, held_elements

CAPACITY = {"NVIDIA H200": 143771 * 2.0**20}  # bytes, as nvidia-smi has them

ORIGIN = (
    "memory: gradients and Adam's moments are as the weights that are trained; DDP has buckets besides; FSDP2 holds "
    "its two largest units whole, weights and gradients in bf16; FP8 copies are two layouts, FSDP2's in these; "
    "activations are what autograd saved in the trace, in bf16; workspaces and buffers of NCCL are not in it"
)


def held(step: EngineStep, ranks: int, fp8: frozenset[str], tables: float = 0.0) -> dict[str, float]:
    """`ranks`: that share parameters, of HSDP a group's; `fp8`: names of weights that run in eight bits;
    `tables`: bytes of the most on a GPU."""
    sharded = step.engine != "ddp"
    shared = ranks if sharded else 1
    size, learnt = (
        sum(p.itemsize * held_elements([p], shared) for p in params) for params in (step.params, step.trained)
    )
    gathered = [event.params for event in step.events if isinstance(event, Gathered) and not event.backward]
    units = sorted(gathered, key=lambda params: -_unit(params, ranks))[:2]
    quantized = [p for params in units for p in params] if sharded else step.params
    return {
        "parameters": size,
        "gradients": learnt if sharded else 2 * learnt,
        "optimizer": 2 * learnt,
        "units": sum(_unit(params, ranks) for params in units),
        "FP8 copies": 2.0 * sum(p.numel for p in quantized if p.name in fp8),
        "activations": float(step.saved),
        "tables": tables,
    }


def _unit(params: Sequence[Param], ranks: int) -> float:
    """Bytes of weights in bf16, and of gradients of those that are trained."""
    return gather_wire(params, ranks).size + gather_wire(trained(params), ranks).size
