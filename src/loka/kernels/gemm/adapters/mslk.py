"""MSLK, to which FBGEMM GenAI moved: its rowwise GEMM, whose schema is FBGEMM's letter by letter.

The tensorwise op is gone there, and the blockwise ones are left to the `fbgemm` kernel.
"""

from __future__ import annotations

import functools

from loka.kernels.gemm.adapters.fbgemm import multiples, run_rowwise, unsupported
from loka.kernels.gemm.kernel import Kernel
from loka.kernels.gemm.legality import bfloat16_on_the_way
from loka.kernels.gemm.libraries import why_missing

MSLK, MSLK_FAST = (
    Kernel(
        name="mslk_fast" if fast else "mslk",
        library="mslk",
        summary=f"CUTLASS rowwise kernel of MSLK, {'fast' if fast else 'float32'} accumulation",
        recipes=("rowwise_e4m3", "rowwise_e4m3_pow2"),
        unsupported=unsupported,
        multiples=multiples,
        run=functools.partial(run_rowwise, fast=fast, namespace="mslk"),
        missing=functools.partial(why_missing, "mslk"),
        fast=fast,
        rounding=bfloat16_on_the_way,
        never_run="written from the op's public schema; no wheel of it was at hand",
    )
    for fast in (False, True)
)
