"""Stand-ins for the kernel libraries, on CPU tensors: the documented signatures, reference arithmetic.

Each checks what the real one checks (types, shapes, strides, alignment) and reads its operands the
way the real one documents, so an adapter that swaps arguments or lays scales out wrongly fails.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

E4M3 = torch.float8_e4m3fn


def module(patch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    """Puts a module in the place of the real one, its parents too."""
    made = ModuleType(name)
    made.__dict__.update(content)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent] if parent in sys.modules else module(patch, parent), child, made)
    patch.setitem(sys.modules, name, made)
    return made


def grouped(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales [R', C'] spread over [rows, columns] in groups of ceil(rows / R') and 128."""
    by_row = rows if scale.shape[0] == 1 else 1 if scale.shape[0] == rows else 128
    return scale.repeat_interleave(by_row, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    return (a.float() * scale_a) @ (b.float() * scale_b).t()


def fake_torchao(patch: pytest.MonkeyPatch) -> None:
    def addmm_float8_unwrapped(
        a_data: torch.Tensor,
        a_scale: torch.Tensor,
        b_data: torch.Tensor,
        b_scale: torch.Tensor,
        output_dtype: torch.dtype,
        output_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        assert output_scale is None
        assert bias is None
        assert a_data.stride(1) == 1
        assert b_data.stride(0) == 1
        rowwise = a_scale.shape == (a_data.shape[0], 1) and b_scale.shape == (1, b_data.shape[1])
        assert rowwise or a_scale.shape == b_scale.shape == ()
        out = product(a_data, b_data.t(), 1 / a_scale, (1 / b_scale).t() if rowwise else 1 / b_scale)
        return (out.bfloat16() if rowwise else out).to(output_dtype)

    def readable(scale: torch.Tensor, rows: int, row_stride: int, columns: int, column_stride: int) -> None:
        last = scale.storage_offset() + (rows - 1) * row_stride + (columns - 1) * column_stride
        assert last < scale.untyped_storage().nbytes() // 4, "a tile's scales lie outside of memory"

    def gemm_128x128(
        a: torch.Tensor,
        b: torch.Tensor,
        a_s: torch.Tensor,
        b_s: torch.Tensor,
        block_size: int = 128,
        out_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[1]
        assert a.stride(1) == b.stride(0) == a_s.stride(0) == b_s.stride(0) == 1
        assert a_s.shape == (m, k // 128)
        assert b_s.shape == (k // 128, -(-n // 128))
        readable(a_s, -(-m // 256) * 256, a_s.stride(0), k // 128, a_s.stride(1))
        readable(b_s, k // 128, b_s.stride(0), -(-n // 256) * 2, b_s.stride(1))
        return product(a, b.t(), grouped(a_s, m, k), grouped(b_s.t(), n, k)).to(out_dtype)

    def gemm_128x1(
        a: torch.Tensor,
        b: torch.Tensor,
        a_s: torch.Tensor,
        b_s: torch.Tensor,
        block_size: int = 128,
        out_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[1]
        assert a.stride(1) == b.stride(0) == a_s.stride(0) == b_s.stride(1) == 1
        assert a_s.shape == (m, k // 128)
        assert b_s.shape == (k // 128, n)
        readable(a_s, -(-m // 256) * 256, a_s.stride(0), k // 128, a_s.stride(1))
        readable(b_s, k // 128, b_s.stride(0), -(-n // 256) * 256, b_s.stride(1))
        return product(a, b.t(), grouped(a_s, m, k), grouped(b_s.t(), n, k)).to(out_dtype)

    module(patch, "torchao")
    module(patch, "torchao.float8.float8_ops", addmm_float8_unwrapped=addmm_float8_unwrapped)
    module(
        patch,
        "torchao.prototype.blockwise_fp8_training.kernels",
        triton_fp8_gemm_1x128_128x128=gemm_128x128,
        triton_fp8_gemm_1x128_128x1=gemm_128x1,
    )


_FBGEMM = {  # schemas read from fbgemm-gpu-genai 1.6.0
    "f8f8bf16": "(Tensor XQ, Tensor WQ, Tensor scale, bool use_fast_accum=True) -> Tensor",
    "f8f8bf16_rowwise": "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? bias=None, "
    "bool use_fast_accum=True) -> Tensor",
    "f8f8bf16_blockwise": "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, int block_m=128, "
    "int block_n=128, int block_k=128) -> Tensor",
    "f8f8bf16_groupwise": "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale) -> Tensor",
}


def fake_fbgemm(patch: pytest.MonkeyPatch, namespace: str, calls: list[tuple[str, bool | None]]) -> Any:
    """The ops on CPU tensors, noting (op, use_fast_accum). Keep what is returned alive."""

    def operands(a: torch.Tensor, b: torch.Tensor, n_multiple: int = 8) -> None:
        assert a.dtype == b.dtype == E4M3
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a.shape[1] == b.shape[1]
        assert a.shape[1] % 16 == 0, "cutlass cannot implement"
        assert b.shape[0] % n_multiple == 0, "cutlass cannot implement"

    def tensorwise(
        a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, use_fast_accum: bool = True
    ) -> torch.Tensor:
        operands(a, b)
        assert scale.numel() == 1
        calls.append(("f8f8bf16", use_fast_accum))
        return (a.float() @ b.float().t() * scale).bfloat16()

    def rowwise(
        a: torch.Tensor,
        b: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        use_fast_accum: bool = True,
    ) -> torch.Tensor:
        operands(a, b)
        assert bias is None
        assert (x_scale.shape, w_scale.shape) == ((a.shape[0],), (b.shape[0],))
        assert x_scale.is_contiguous()
        assert w_scale.is_contiguous()
        calls.append(("f8f8bf16_rowwise", use_fast_accum))
        return product(a, b, x_scale[:, None], w_scale[:, None]).bfloat16()

    def blockwise(
        a: torch.Tensor,
        b: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        block_m: int = 128,
        block_n: int = 128,
        block_k: int = 128,
    ) -> torch.Tensor:
        operands(a, b)
        assert (block_m, block_n, block_k) == (128, 128, 128)
        groups = a.shape[1] // 128
        for scale, operand in ((x_scale, a), (w_scale, b)):
            assert scale.shape == (-(-operand.shape[0] // 128), groups)
            assert scale.stride() == (groups, 1)
        calls.append(("f8f8bf16_blockwise", None))
        blocks = (s.repeat_interleave(128, 0)[: t.shape[0]] for s, t in ((x_scale, a), (w_scale, b)))
        scale_a, scale_b = (s.repeat_interleave(128, 1) for s in blocks)
        return product(a, b, scale_a, scale_b).bfloat16()

    def groupwise(
        a: torch.Tensor, b: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor
    ) -> torch.Tensor:
        operands(a, b)
        (m, k), n = a.shape, b.shape[0]
        assert m % 4 == 0, "TMA"
        assert x_scale.data_ptr() % 16 == 0, "TMA"
        # Read as CUTLASS does, by address: M fastest, then K.
        flat_x = torch.as_strided(x_scale, (k // 128 * m,), (1,)).view(k // 128, m)
        flat_w = torch.as_strided(w_scale, (k // 128 * -(-n // 128),), (1,)).view(k // 128, -(-n // 128))
        assert x_scale.shape == flat_x.shape
        assert w_scale.shape == flat_w.shape
        calls.append(("f8f8bf16_groupwise", None))
        scale_b = flat_w.t().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        return product(a, b, flat_x.t().repeat_interleave(128, 1), scale_b).bfloat16()

    functions = (tensorwise, rowwise, blockwise, groupwise)
    library = torch.library.Library(namespace, "FRAGMENT")
    for (name, schema), function in zip(_FBGEMM.items(), functions, strict=True):
        if not hasattr(getattr(torch.ops, namespace), name):  # the real one may be loaded
            library.define(name + schema)
        library.impl(name, function, "CPU")
    if namespace == "fbgemm":
        module(patch, "fbgemm_gpu.experimental.gen_ai")
    else:
        module(patch, "mslk.gemm")
    return library


def fake_deep_gemm(patch: pytest.MonkeyPatch, calls: list[tuple[tuple[int, ...], str]]) -> None:
    def tma_aligned(scale: torch.Tensor, rows: int) -> None:
        assert scale.stride() == (1, -(-rows // 4) * 4), "the library would launch a transpose"
        assert scale.data_ptr() % 16 == 0

    def fp8_gemm_nt(
        a: tuple[torch.Tensor, torch.Tensor],
        b: tuple[torch.Tensor, torch.Tensor],
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        recipe: tuple[int, int, int] | None = None,
        recipe_a: object = None,
        recipe_b: object = None,
        compiled_dims: str = "",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        (m, k), n = a[0].shape, b[0].shape[0]
        assert a[0].dtype == b[0].dtype == E4M3
        assert a[0].stride(1) == b[0].stride(1) == 1
        assert a[1].shape == (m, k // 128)
        tma_aligned(a[1], m)
        assert recipe is not None
        if recipe[1] == 1:
            assert recipe == (1, 1, 128)
            assert b[1].shape == (n, k // 128)
            tma_aligned(b[1], n)
            assert d.dtype == torch.float32
            assert c is not None
            assert c.data_ptr() == d.data_ptr()
            scale_b = b[1]
        else:
            assert recipe == (1, 128, 128)
            assert b[1].shape == (-(-n // 128), k // 128)
            assert b[1].stride() == (k // 128, 1)
            assert d.dtype == torch.bfloat16
            assert c is None
            scale_b = b[1].repeat_interleave(128, 0)[:n]
        calls.append((recipe, compiled_dims))
        scale_a, scale_b = (scale.repeat_interleave(128, 1) for scale in (a[1], scale_b))
        d.copy_(product(a[0], b[0], scale_a, scale_b) + (0 if c is None else c))

    module(patch, "deep_gemm", fp8_gemm_nt=fp8_gemm_nt)


class _Desc(enum.IntEnum):
    TRANSA = 3
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    FAST_ACCUM = 25
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32


class _Preference(enum.IntEnum):
    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


_Scale = enum.IntEnum("_Scale", {"SCALAR_32F": 0, "OUTER_VEC_32F": 3, "VEC128_32F": 4, "BLK128x128_32F": 5})
_SIZES = {  # bytes, as nvmath-python 1.0.0 says (get_matmul_*_attribute_dtype)
    **dict.fromkeys((_Desc.TRANSA, _Desc.A_SCALE_MODE, _Desc.B_SCALE_MODE), 4),
    **dict.fromkeys((_Desc.A_SCALE_POINTER, _Desc.B_SCALE_POINTER), 8),
    _Desc.FAST_ACCUM: 1,
}
_TYPES = {28: E4M3, 29: torch.float8_e5m2, 14: torch.bfloat16, 2: torch.float16, 0: torch.float32}


def at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """The memory there, as a tensor that writes through."""
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


class FakeCublasLt(ModuleType):
    """nvmath.bindings.cublasLt: column-major, handles are numbers. `calls`: (algorithm, fast, workspace)."""

    MatmulDescAttribute = _Desc
    MatmulPreferenceAttribute = _Preference
    MatmulMatrixScale = _Scale
    matmul_heuristic_result_dtype = np.dtype(
        [
            ("algo", [("data_", "<u8", (8,))]),
            ("workspace_size", "<u8"),
            ("state", "<i4"),
            ("waves_count", "<f4"),
            ("reserved", "<i4", (4,)),
        ]
    )

    def __init__(self) -> None:
        super().__init__("nvmath.bindings.cublasLt")
        self.objects: dict[int, dict[Any, Any]] = {}
        self.searches = 0
        self.calls: list[tuple[int, bool, int]] = []
        self.found = 3

    def get_version(self) -> int:
        return 130000

    def create(self) -> int:
        return 99

    def _new(self, **content: Any) -> int:
        number = 1000 + self.searches * 100 + len(self.objects)
        while number in self.objects:
            number += 1
        self.objects[number] = content
        return number

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        assert (compute_type, scale_type) == (68, 0)
        return self._new()

    def matrix_layout_create(self, type: int, rows: int, cols: int, ld: int) -> int:
        assert ld == rows
        return self._new(dtype=_TYPES[type], rows=rows, columns=cols)

    def matmul_preference_create(self) -> int:
        return self._new()

    def matmul_desc_destroy(self, owner: int) -> None:
        del self.objects[owner]

    matrix_layout_destroy = matmul_preference_destroy = matmul_desc_destroy

    def matmul_desc_set_attribute(self, owner: int, attribute: int, buffer: int, size: int) -> None:
        assert size == _SIZES[_Desc(attribute)]
        self.objects[owner][_Desc(attribute)] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_preference_set_attribute(self, owner: int, attribute: int, buffer: int, size: int) -> None:
        assert size == (8 if attribute == _Preference.MAX_WORKSPACE_BYTES else 4)
        self.objects[owner][_Preference(attribute)] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_algo_get_heuristic(
        self, handle: int, desc: int, a: int, b: int, c: int, d: int, preference: int, asked: int, *into: int
    ) -> None:
        assert handle == 99
        self.searches += 1
        wishes = self.objects[preference]
        assert wishes[_Preference.REDUCTION_SCHEME_MASK] == 2
        assert set(wishes) == set(_Preference)
        assert wishes[_Preference.MIN_ALIGNMENT_A_BYTES] >= 16
        if not self.found:
            raise RuntimeError("NOT_SUPPORTED")
        dtype = self.matmul_heuristic_result_dtype
        room = (ctypes.c_uint8 * (asked * dtype.itemsize)).from_address(into[0])
        results = np.frombuffer(room, dtype=dtype)  # writes through
        for index in range(self.found):
            results["algo"]["data_"][index, 0] = 40 + index
            results["workspace_size"][index] = 64 * index
            results["state"][index] = 15 if index == 1 else 0  # the second one fails its check
        ctypes.c_int.from_address(into[1]).value = self.found

    def _scaled(self, layout: int, address: int, mode: int, pointer: int) -> torch.Tensor:
        """A matrix [K, side] in float32 with its scales on, read from memory as cuBLASLt documents."""
        matrix = self.objects[layout]
        k, side = matrix["rows"], matrix["columns"]
        assert address % 16 == 0
        assert pointer % 16 == 0, "NOT_SUPPORTED"
        values = at(address, matrix["dtype"], k * side).view(side, k).t().float()
        groups = -(-k // 128)
        if mode == _Scale.SCALAR_32F:
            return values * at(pointer, torch.float32, 1)
        if mode == _Scale.OUTER_VEC_32F:
            return values * at(pointer, torch.float32, side)
        if mode == _Scale.VEC128_32F:
            scale = at(pointer, torch.float32, groups * side).view(groups, side)
            return values * scale.repeat_interleave(128, 0)[:k]
        padded, blocks = -(-groups // 4) * 4, -(-side // 128)
        scale = at(pointer, torch.float32, padded * blocks).view(blocks, padded)[:, :groups].t()
        return values * scale.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :side]

    def matmul(
        self,
        handle: int,
        desc: int,
        alpha: int,
        a: int,
        adesc: int,
        b: int,
        bdesc: int,
        beta: int,
        c: int,
        cdesc: int,
        d: int,
        ddesc: int,
        algo: int,
        workspace: int,
        workspace_size: int,
        stream: int,
    ) -> None:
        assert (handle, stream) == (99, 7)
        settings = self.objects[desc]
        assert settings[_Desc.TRANSA] == 1, "FP8 needs the first operand transposed"
        modes = settings[_Desc.A_SCALE_MODE], settings[_Desc.B_SCALE_MODE]
        first = self._scaled(adesc, a, modes[0], settings[_Desc.A_SCALE_POINTER])
        second = self._scaled(bdesc, b, modes[1], settings[_Desc.B_SCALE_POINTER])
        out = self.objects[ddesc]
        assert (out["rows"], out["columns"]) == (first.shape[1], second.shape[1])
        assert (at(alpha, torch.float32, 1).item(), at(beta, torch.float32, 1).item()) == (1, 0)
        assert (c, cdesc) == (d, ddesc)
        assert bool(workspace) == bool(workspace_size)
        memory = at(d, out["dtype"], out["rows"] * out["columns"]).view(out["columns"], out["rows"])
        memory.copy_((first.t() @ second).t())
        used = ctypes.c_uint64.from_address(algo).value
        self.calls.append((used, bool(settings[_Desc.FAST_ACCUM]), workspace_size))


def fake_cublaslt(patch: pytest.MonkeyPatch) -> FakeCublasLt:
    fake = FakeCublasLt()
    bindings = module(patch, "nvmath.bindings")
    bindings.cublasLt = fake  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "nvmath.bindings.cublasLt", fake)
    return fake
