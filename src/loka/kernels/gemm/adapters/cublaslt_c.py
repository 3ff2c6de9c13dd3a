"""The C interface of cuBLASLt, of the very library that torch has loaded: the same version, and no package more.

Names are those of cublasLt.h (CUDA 12.9 and newer) without their prefix; its numbers never change. Objects and
addresses are integers. Every function raises RuntimeError with cuBLASLt's own name of what went wrong.
"""

import ctypes
import enum
import functools
from typing import Any

import numpy as np
import torch

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "Create": (_POINTER,),
    "MatmulDescCreate": (_POINTER, _INT, _INT),
    "MatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulDescDestroy": (_POINTER,),
    "MatrixLayoutCreate": (_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatrixLayoutDestroy": (_POINTER,),
    "MatmulPreferenceCreate": (_POINTER,),
    "MatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulPreferenceDestroy": (_POINTER,),
    "MatmulAlgoGetHeuristic": (*[_POINTER] * 7, _INT, _POINTER, _POINTER),
    "Matmul": (*[_POINTER] * 14, _SIZE, _POINTER),
}

# cudaDataType, cublasComputeType_t, cublasLtReductionScheme_t, cublasOperation_t
TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: 14, torch.float16: 2, torch.float32: 0}
COMPUTE_32F = 68
REDUCE_IN_FLOAT32 = 2  # of sums that are cut; the other schemes add partial sums in the type of the result
TRANSPOSE = 1

HEURISTIC_RESULT = np.dtype(
    [
        ("algo", "<u8", (8,)),
        ("workspace_size", "<u8"),
        ("state", "<i4"),
        ("waves_count", "<f4"),
        ("reserved", "<i4", (4,)),
    ]
)
"""cublasLtMatmulHeuristicResult_t: an algorithm, the bytes of workspace it takes, and its status."""


class Desc(enum.IntEnum):
    """cublasLtMatmulDescAttributes_t"""

    TRANSA = 3
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    FAST_ACCUM = 25
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32


class Preference(enum.IntEnum):
    """cublasLtMatmulPreferenceAttributes_t"""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class Scale(enum.IntEnum):
    """cublasLtMatmulMatrixScale_t"""

    SCALAR_32F = 0
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5


@functools.cache
def why_missing() -> str | None:
    """Why there is no cuBLASLt here, or None."""
    try:
        _functions()
    except (OSError, AttributeError) as error:
        return f"this torch brings no cuBLASLt: {error}"
    return None


@functools.cache
def _functions() -> dict[str, Any]:
    """By name. Raises OSError where there is no library, AttributeError where it lacks a function."""
    version = torch.version.cuda
    if version is None:
        raise OSError("it is built without CUDA")
    library = ctypes.CDLL(f"libcublasLt.so.{version.partition('.')[0]}")  # loaded by torch, and found by this name
    found = {name: getattr(library, f"cublasLt{name}") for name in (*_FUNCTIONS, "GetStatusName", "GetVersion")}
    found["GetStatusName"].restype, found["GetVersion"].restype = ctypes.c_char_p, _SIZE
    for name, kinds in _FUNCTIONS.items():
        found[name].argtypes = kinds
    return found


def version() -> int:
    """Such as 130100 for 13.1.0."""
    return int(_functions()["GetVersion"]())


def call(name: str, *given: Any) -> None:
    """cublasLt`name`(`given`), which returns a status."""
    functions = _functions()
    if status := functions[name](*given):
        raise RuntimeError(f"cublasLt{name}: {functions['GetStatusName'](status).decode()}")


def create(name: str, *given: Any) -> int:
    """The object that cublasLt`name`(address of it, `given`) makes."""
    made = ctypes.c_void_p()
    call(name, ctypes.byref(made), *given)
    assert made.value is not None
    return made.value
