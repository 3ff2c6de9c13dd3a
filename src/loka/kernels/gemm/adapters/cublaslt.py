"""cuBLASLt by its C interface: what torch calls, with a choice of algorithm.

torch always takes the first algorithm of cuBLASLt's heuristic; here `algorithm=i` takes the i-th of
up to eight. cuBLASLt is column-major, so it computes out^T [N, M] = B A^T: its first operand is our
B [N, K], seen as K x N and transposed, its second our A [M, K], seen as K x M. Its "A scale" is
therefore the scale of our B.

A plan (descriptor, layouts, heuristic) is made once for each shape, types and alignment; a call
then sets two pointers. The workspace comes from torch's allocator on every call, so it follows
the stream and belongs to a CUDA graph that captures the call; most algorithms need none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from loka.core.device import on_device_of
from loka.core.exceptions import LokaError, first_line
from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import Granularity, Recipe
from loka.kernels.gemm.adapters import cublaslt_c as lt
from loka.kernels.gemm.kernel import Kernel
from loka.kernels.gemm.layouts import column_major, padded_rows, single, vector
from loka.kernels.gemm.legality import (
    before_cuda_12_9,
    cublaslt_multiples,
    granularities,
    misaligned,
    no_fp8,
    not_float64,
    not_hopper,
)

_FAST_RECIPES = ("tensorwise_e4m3", "tensorwise_e5m2", "rowwise_e4m3", "rowwise_e4m3_pow2")
_REQUESTED = 8  # algorithms
_WORKSPACE_LIMIT = 32 << 20  # bytes; torch's own limit on Hopper
# Bytes of workspace. Algorithms that hand out tiles by a counter ask for 4 (CUDA 13.0, H200); the float32 sums
# of the smallest tile, 64 x 8, take 2,048.
_COUNTERS = 1024

_SCALE_MODES = {
    Granularity.TENSOR: lt.Scale.SCALAR_32F,
    Granularity.ROW: lt.Scale.OUTER_VEC_32F,
    Granularity.GROUP_1X128: lt.Scale.VEC128_32F,
    Granularity.BLOCK_128X128: lt.Scale.BLK128x128_32F,
}
_LAYOUTS = {
    Granularity.TENSOR: single,
    Granularity.ROW: vector,
    Granularity.GROUP_1X128: column_major,
    Granularity.BLOCK_128X128: padded_rows,
}
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
_ALPHA, _BETA = _ONE.ctypes.data, _ZERO.ctypes.data


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    if refused := no_fp8(problem.target) or not_float64(problem):
        return refused
    both = granularities(problem, recipe)
    if both != (Granularity.TENSOR, Granularity.TENSOR):
        refused = not_hopper(problem.target, "takes row and block scales on sm_90") or before_cuda_12_9()
    if Granularity.GROUP_1X128 in both and problem.dtype not in ("bfloat16", "float32"):
        refused = refused or f"{problem.dtype} results; with block scales it writes bfloat16 or float32"
    m, n, k = cublaslt_multiples(problem, recipe)
    return refused or misaligned(problem, m=m, n=n, k=k)


class _Key(NamedTuple):
    """What a plan depends on. `alignment` of all three matrices in bytes."""

    m: int
    n: int
    k: int
    types: tuple[torch.dtype, torch.dtype, torch.dtype]  # A, B, out
    scales: tuple[Granularity, Granularity]  # A, B
    fast: bool
    alignment: int
    device: int


@dataclass(eq=False, kw_only=True)
class _Plan:
    """cuBLASLt's objects for a key. `algorithms` holds (address, bytes of workspace)."""

    handle: int
    descriptor: int
    layouts: tuple[int, int, int]  # of B, A and out, in cuBLASLt's order
    results: Any  # the array that `algorithms` points into
    algorithms: tuple[tuple[int, int], ...]
    failure: str
    pointers: Any  # int64 [2]: the addresses of B's and of A's scale, which the descriptor copies
    where: int  # address of `pointers`
    scaled_by: tuple[int, int] = (0, 0)  # those that the descriptor has
    lock: threading.Lock = field(default_factory=threading.Lock)  # the descriptor holds pointers of a call


@functools.cache
def _handle(device: int) -> int:
    return lt.create("Create")  # of the current device


@functools.lru_cache(maxsize=1024)
def _plan(key: _Key) -> _Plan:
    """Needs `key.device` to be the current one; touches no GPU memory."""
    with contextlib.ExitStack() as owned:
        descriptor = lt.create("MatmulDescCreate", lt.COMPUTE_32F, lt.TYPES[torch.float32])
        owned.callback(lt.call, "MatmulDescDestroy", descriptor)
        # An address that is aligned: the heuristic asks only whether there is one.
        placeholder = np.int64(4096)
        attributes: tuple[tuple[lt.Desc, Any], ...] = (
            (lt.Desc.TRANSA, np.int32(lt.TRANSPOSE)),
            *_scale_modes(key),
            (lt.Desc.A_SCALE_POINTER, placeholder),
            (lt.Desc.B_SCALE_POINTER, placeholder),
            (lt.Desc.FAST_ACCUM, np.int8(key.fast)),
        )
        for attribute, value in attributes:
            _set("MatmulDescSetAttribute", descriptor, attribute, value)
        type_a, type_b, type_out = (lt.TYPES[dtype] for dtype in key.types)
        layouts = []
        for kind, rows, columns in ((type_b, key.k, key.n), (type_a, key.k, key.m), (type_out, key.n, key.m)):
            layout = lt.create("MatrixLayoutCreate", kind, rows, columns, rows)
            owned.callback(lt.call, "MatrixLayoutDestroy", layout)
            layouts.append(layout)
        results = np.zeros(_REQUESTED, dtype=lt.HEURISTIC_RESULT)
        count = np.zeros(1, dtype=np.int32)
        failure = "the heuristic found none"
        preference = lt.create("MatmulPreferenceCreate")
        try:
            preferences: tuple[tuple[lt.Preference, Any], ...] = (
                (lt.Preference.MAX_WORKSPACE_BYTES, np.uint64(_WORKSPACE_LIMIT)),
                (lt.Preference.REDUCTION_SCHEME_MASK, np.uint32(lt.REDUCE_IN_FLOAT32)),
                *((lt.Preference[f"MIN_ALIGNMENT_{x}_BYTES"], np.uint32(key.alignment)) for x in "ABCD"),
            )
            for wish, value in preferences:
                _set("MatmulPreferenceSetAttribute", preference, wish, value)
            lt.call(
                "MatmulAlgoGetHeuristic",
                _handle(key.device),
                descriptor,
                *layouts,
                layouts[2],
                preference,
                _REQUESTED,
                results.ctypes.data,
                count.ctypes.data,
            )
        except RuntimeError as error:  # NOT_SUPPORTED is how cuBLASLt says that there is no algorithm
            failure = first_line(error)
        finally:
            lt.call("MatmulPreferenceDestroy", preference)
        pointers = np.zeros(2, dtype=np.int64)
        plan = _Plan(
            handle=_handle(key.device),
            descriptor=descriptor,
            layouts=(layouts[0], layouts[1], layouts[2]),
            results=results,
            algorithms=tuple(
                (results.ctypes.data + i * results.itemsize, int(results["workspace_size"][i]))
                for i in range(int(count[0]))
                if results["state"][i] == 0
            ),
            failure=failure,
            pointers=pointers,
            where=pointers.ctypes.data,
        )
        weakref.finalize(plan, owned.pop_all().close).atexit = False
    return plan


def _scale_modes(key: _Key) -> Iterator[tuple[lt.Desc, Any]]:
    """Those other than one scale for a matrix, which is the default: before CUDA 12.8 there is no such attribute."""
    for attribute, granularity in zip((lt.Desc.B_SCALE_MODE, lt.Desc.A_SCALE_MODE), key.scales, strict=True):
        if _SCALE_MODES[granularity] is not lt.Scale.SCALAR_32F:
            yield attribute, np.int32(_SCALE_MODES[granularity])


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0, fast: bool) -> torch.Tensor:
    (m, k), n, device = a.shape, b.shape[0], a.data.device
    scales = a.cast.granularity, b.cast.granularity
    scale_a, scale_b = _LAYOUTS[scales[0]](a.scale), _LAYOUTS[scales[1]](b.scale)
    with on_device_of(a.data):
        out = torch.empty(m, n, dtype=dtype, device=device)
        at_a, at_b, at_out = a.data.data_ptr(), b.data.data_ptr(), out.data_ptr()
        bits = at_a | at_b | at_out
        types = a.data.dtype, b.data.dtype, dtype
        plan = _plan(_Key(m, n, k, types, scales, fast, min(bits & -bits, 256), a.data.get_device()))
        if not plan.algorithms:
            raise LokaError(
                f"cuBLASLt has no algorithm for M={m} N={n} K={k} in {dtype}",
                why=[plan.failure],
                way_out="plan again with another candidate at this site: loka.plan(report, force={site: candidate})",
            )
        address, size = plan.algorithms[min(algorithm, len(plan.algorithms) - 1)]
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        pointers = scale_b.data_ptr(), scale_a.data_ptr()
        with plan.lock:
            if plan.scaled_by != pointers:  # the addresses of a step come again in the next one
                plan.pointers[:] = pointers
                plan.scaled_by = (0, 0)
                lt.call("MatmulDescSetAttribute", plan.descriptor, lt.Desc.A_SCALE_POINTER, plan.where, 8)
                lt.call("MatmulDescSetAttribute", plan.descriptor, lt.Desc.B_SCALE_POINTER, plan.where + 8, 8)
                plan.scaled_by = pointers
            lt.call(
                "Matmul",
                plan.handle,
                plan.descriptor,
                _ALPHA,
                at_b,
                plan.layouts[0],
                at_a,
                plan.layouts[1],
                _BETA,
                at_out,
                plan.layouts[2],
                at_out,
                plan.layouts[2],
                address,
                0 if workspace is None else workspace.data_ptr(),
                size,
                _stream(device),
            )
    return out


def _set(function: str, owner: int, attribute: int, value: Any) -> None:
    array = np.array([value])
    lt.call(function, owner, attribute, array.ctypes.data, array.nbytes)


def _stream(device: torch.device) -> int:
    """The current one's address, at a tenth of the host's time that `torch.cuda.current_stream` takes."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def uncut(problem: Problem, recipe: Recipe, *, fast: bool) -> list[int]:
    """The algorithms that add up each sum in one program, and so in one order: where sums are cut, their parts need
    more of a workspace than `_COUNTERS`, for all reduction schemes but that one are masked.
    """
    algorithms = _usual_plan(problem, recipe, fast=fast).algorithms
    return [index for index, (_, size) in enumerate(algorithms) if size <= _COUNTERS]


def _algorithms(problem: Problem, recipe: Recipe, *, fast: bool) -> int:
    """Never 0: where the heuristic finds none, running says so."""
    return max(1, len(_usual_plan(problem, recipe, fast=fast).algorithms))


def _usual_plan(problem: Problem, recipe: Recipe, *, fast: bool) -> _Plan:
    padded = problem.padded(cublaslt_multiples(problem, recipe))
    casts = recipe.casts(problem.gemm)
    assert casts is not None
    types = casts[0].format.dtype, casts[1].format.dtype, DTYPES[problem.dtype]
    scales = casts[0].granularity, casts[1].granularity
    device = torch.cuda.current_device()
    # torch allocates at 512 bytes; operands that begin elsewhere may have other algorithms.
    return _plan(_Key(padded.m, padded.n, padded.k, types, scales, fast, 256, device))


CUBLASLT, CUBLASLT_FAST = (
    Kernel(
        name="cublaslt_fast" if fast else "cublaslt",
        library="cublaslt",
        recipes=_FAST_RECIPES if fast else (*_FAST_RECIPES, "blockwise_e4m3"),
        unsupported=_unsupported,
        multiples=cublaslt_multiples,
        run=functools.partial(_run, fast=fast),
        missing=lt.why_missing,
        algorithms=functools.partial(_algorithms, fast=fast),
        fast=fast,
        on_request="searching its up to eight algorithms takes as long as that many kernels; compiled regions search",
    )
    for fast in (False, True)
)
