"""Many GPUs on torch's own engines: FSDP2 with weights gathered in FP8, gradients sent by codecs."""

from loka.distributed.dense_sharding import average_gradients, replicated_tables, shard_dense
from loka.distributed.fp8_all_gather import Fp8AllGather, Gathered, fp8_all_gather
from loka.distributed.gradient_wire import GradientWire, send_gradients

__all__ = [
    "Fp8AllGather",
    "Gathered",
    "GradientWire",
    "average_gradients",
    "fp8_all_gather",
    "replicated_tables",
    "send_gradients",
    "shard_dense",
]
