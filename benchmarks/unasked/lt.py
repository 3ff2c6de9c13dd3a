"""What would a GEMM take the host if cuBLASLt were called directly, by a plan that is made once for each problem?

    python benchmarks/unasked/lt.py           # one H200

`torch._scaled_mm` asks cuBLASLt's heuristic in every call: 20 to 65 us of a host (2026-11-30). Here ctypes calls the
library that torch has loaded, with descriptors that are made once; a call sets two pointers. If it takes some 10 us
and its bits are torch's, eager sites need no CUDA graphs, and nothing to be captured in the middle of training.
NOT YET RUN.
"""

import ctypes
import itertools
import re
import time
from pathlib import Path

import torch

TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: 14, torch.float32: 0}
COMPUTE_32F, CUDA_R_32F, TRANSPOSE = 68, 0, 1
TRANSA, A_SCALE, B_SCALE, FAST, A_MODE, B_MODE = 3, 17, 18, 25, 31, 32
SCALAR, OUTER_VEC = 0, 3
MAX_WORKSPACE = 1
SPACE = 32 << 20


class Result(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def library():
    torch.mm(torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda"))
    path = re.search(r"(/\S*libcublasLt\.so\S*)", Path("/proc/self/maps").read_text()).group(1)
    return ctypes.CDLL(path)


lt = library()
P = ctypes.c_void_p
lt.cublasLtMatmul.argtypes = [P] * 12 + [P, P, ctypes.c_size_t, P]
lt.cublasLtMatmulDescSetAttribute.argtypes = [P, ctypes.c_int, P, ctypes.c_size_t]


def check(status):
    assert status == 0, f"cuBLASLt: {status}"


def new(function, *given):
    made = P()
    check(function(ctypes.byref(made), *given))
    return made


handle = new(lt.cublasLtCreate)
one, zero = ctypes.c_float(1), ctypes.c_float(0)


class Plan:
    """out^T [N, M] = B A^T by columns: the first operand is B [N, K] transposed, the second A [M, K]."""

    def __init__(self, m, n, k, types, rows, fast):
        self.desc = new(lt.cublasLtMatmulDescCreate, COMPUTE_32F, CUDA_R_32F)
        mode = ctypes.c_int32(OUTER_VEC if rows else SCALAR)
        for name, value in (
            (TRANSA, ctypes.c_int32(TRANSPOSE)),
            (A_MODE, mode),
            (B_MODE, mode),
            (A_SCALE, ctypes.c_int64(4096)),
            (B_SCALE, ctypes.c_int64(4096)),
            (FAST, ctypes.c_int8(fast)),
        ):
            self.set(name, value)
        a, b, out = (TYPES[each] for each in types)
        i64, u64 = ctypes.c_int64, ctypes.c_uint64
        self.layouts = [
            new(lt.cublasLtMatrixLayoutCreate, kind, u64(r), u64(c), i64(r))
            for kind, r, c in ((b, k, n), (a, k, m), (out, n, m))
        ]
        wish = new(lt.cublasLtMatmulPreferenceCreate)
        space = ctypes.c_size_t(SPACE)
        check(lt.cublasLtMatmulPreferenceSetAttribute(wish, MAX_WORKSPACE, ctypes.byref(space), ctypes.sizeof(space)))
        self.result, count = Result(), ctypes.c_int()
        check(
            lt.cublasLtMatmulAlgoGetHeuristic(
                handle, self.desc, *self.layouts, self.layouts[2], wish, 1, ctypes.byref(self.result), ctypes.byref(count)
            )
        )
        assert count.value == 1
        self.pointers = (ctypes.c_int64 * 2)()
        self.where = ctypes.addressof(self.pointers)
        print(f"  workspace {self.result.workspace}")

    def set(self, name, value):
        check(lt.cublasLtMatmulDescSetAttribute(self.desc, name, ctypes.addressof(value), ctypes.sizeof(value)))

    def __call__(self, a, sa, b, sb, out, space):
        self.pointers[0], self.pointers[1] = sb.data_ptr(), sa.data_ptr()
        lt.cublasLtMatmulDescSetAttribute(self.desc, A_SCALE, self.where, 8)
        lt.cublasLtMatmulDescSetAttribute(self.desc, B_SCALE, self.where + 8, 8)
        at = out.data_ptr()
        check(
            lt.cublasLtMatmul(
                handle,
                self.desc,
                ctypes.addressof(one),
                b.data_ptr(),
                self.layouts[0],
                a.data_ptr(),
                self.layouts[1],
                ctypes.addressof(zero),
                at,
                self.layouts[2],
                at,
                self.layouts[2],
                ctypes.addressof(self.result),
                space.data_ptr(),
                SPACE,
                torch._C._cuda_getCurrentRawStream(0),
            )
        )


def timed(name, f, count=2000):
    for _ in range(20):
        f()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        f()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    print(f"  {name:28} host {1e6 * host / count:7.2f} whole {1e6 * (time.perf_counter() - began) / count:8.2f} us")


space = torch.empty(SPACE, dtype=torch.uint8, device="cuda")
for (m, n, k), rows, fast, dtype in itertools.product(
    ((64, 64, 64), (6144, 2048, 2048), (2048, 2048, 6144), (512, 256, 1024)),
    (False, True),
    (False, True),
    (torch.bfloat16, torch.float32),
):
    torch.manual_seed(0)
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    sa = torch.rand(m, 1, device="cuda") if rows else torch.rand((), device="cuda")
    sb = torch.rand(n, 1, device="cuda") if rows else torch.rand((), device="cuda")
    out = torch.empty(m, n, dtype=dtype, device="cuda")
    print(f"{m} x {n} x {k}, {'rows' if rows else 'tensor'}, {'fast' if fast else 'exact'}, {dtype}")
    try:
        plan = Plan(m, n, k, (a.dtype, b.dtype, dtype), rows, fast)
        right = torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=dtype, use_fast_accum=fast)
        plan(a, sa, b, sb, out, space)
        print("  equal bit for bit:", torch.equal(out, right), flush=True)
        timed("cuBLASLt", lambda: plan(a, sa, b, sb, out, space))
        timed("torch._scaled_mm", lambda: torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=dtype, use_fast_accum=fast))
    except Exception as error:
        print("  failed:", str(error)[:200], flush=True)
