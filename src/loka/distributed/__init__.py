"""Many GPUs on torch's own engines: FSDP2 with weights gathered in FP8."""

from loka.distributed.fp8_all_gather import Fp8AllGather, Gathered, fp8_all_gather

__all__ = ["Fp8AllGather", "Gathered", "fp8_all_gather"]
