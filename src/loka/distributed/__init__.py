"""Many GPUs on torch's own engines: FSDP2 with weights gathered in FP8, gradients sent by codecs, tables that
replicas keep together by the rows they changed."""

from loka.distributed.fp8_all_gather import Fp8AllGather, Gathered, fp8_all_gather
from loka.distributed.gradient_wire import GradientWire, send_gradients
from loka.distributed.momentum_scale import momentum_scaled
from loka.distributed.row_sync import RowSync, Traffic, row_sync

__all__ = [
    "Fp8AllGather",
    "Gathered",
    "GradientWire",
    "RowSync",
    "Traffic",
    "fp8_all_gather",
    "momentum_scaled",
    "row_sync",
    "send_gradients",
]
