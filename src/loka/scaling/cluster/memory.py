"""What a GPU holds in a step: an estimate, from the traced step."""

from loka.scaling.cluster.engines import EngineStep, Gathered
from loka.scaling.cluster.wires import gather_wire, held_elements

CAPACITY = {"NVIDIA H200": 143771 * 2.0**20}  # bytes, as nvidia-smi has them

ORIGIN = (
    "memory: gradients and Adam's moments are as the weights; DDP has buckets besides; FSDP2 holds its two "
    "largest units whole, weights and gradients in bf16; FP8 copies are two layouts, FSDP2's in these; "
    "activations are what autograd saved in the trace, in bf16; workspaces and buffers of NCCL are not in it"
)


def held(step: EngineStep, ranks: int, fp8: frozenset[str], tables: float = 0.0) -> dict[str, float]:
    """`ranks`: that share parameters, of HSDP a group's; `fp8`: names of weights that run in eight bits;
    `tables`: bytes of the most on a GPU."""
    sharded = step.engine != "ddp"
    size = step.itemsize * held_elements(step.params, ranks if sharded else 1)
    gathered = [event.params for event in step.events if isinstance(event, Gathered) and not event.backward]
    units = sorted(gathered, key=lambda params: -gather_wire(params, ranks).size)[:2]
    quantized = [p for params in units for p in params] if sharded else step.params
    return {
        "parameters": size,
        "gradients": size if sharded else 2 * size,
        "optimizer": 2 * size,
        "units": 2 * sum(gather_wire(params, ranks).size for params in units),
        "FP8 copies": 2.0 * sum(p.numel for p in quantized if p.name in fp8),
        "activations": float(step.saved),
        "tables": tables,
    }
