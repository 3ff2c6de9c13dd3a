"""A stand-in for nvmath's bindings of cuBLASLt, on CPU tensors; see fake_libraries.py."""

import ctypes
import enum
import sys
from types import ModuleType

import numpy as np
import torch
from fake_libraries import E4M3, module


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


def at(address, dtype, count):
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

    def __init__(self):
        super().__init__("nvmath.bindings.cublasLt")
        self.objects = {}
        self.searches = 0
        self.calls = []
        self.found = 3

    def get_version(self):
        return 130000

    def create(self):
        return 99

    def _new(self, **content):
        number = 1000 + self.searches * 100 + len(self.objects)
        while number in self.objects:
            number += 1
        self.objects[number] = content
        return number

    def matmul_desc_create(self, compute_type, scale_type):
        assert (compute_type, scale_type) == (68, 0)
        return self._new()

    def matrix_layout_create(self, type, rows, cols, ld):
        assert ld == rows
        return self._new(dtype=_TYPES[type], rows=rows, columns=cols)

    def matmul_preference_create(self):
        return self._new()

    def matmul_desc_destroy(self, owner):
        del self.objects[owner]

    matrix_layout_destroy = matmul_preference_destroy = matmul_desc_destroy

    def matmul_desc_set_attribute(self, owner, attribute, buffer, size):
        assert size == _SIZES[_Desc(attribute)]
        self.objects[owner][_Desc(attribute)] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_preference_set_attribute(self, owner, attribute, buffer, size):
        assert size == (8 if attribute == _Preference.MAX_WORKSPACE_BYTES else 4)
        self.objects[owner][_Preference(attribute)] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def matmul_algo_get_heuristic(self, handle, desc, a, b, c, d, preference, asked, *into):
        assert handle == 99
        self.searches += 1
        wishes = self.objects[preference]
        assert wishes[_Preference.REDUCTION_SCHEME_MASK] == 2
        assert set(wishes) == set(_Preference)
        assert wishes[_Preference.MIN_ALIGNMENT_A_BYTES] >= 16
        self.objects[desc]["alignment"] = wishes[_Preference.MIN_ALIGNMENT_A_BYTES]
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

    def _scaled(self, layout, address, mode, pointer):
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
        self, handle, desc, alpha, a, adesc, b, bdesc, beta, c, cdesc, d, ddesc, algo, workspace, workspace_size, stream
    ):
        assert (handle, stream) == (99, 7)
        settings = self.objects[desc]
        assert settings[_Desc.TRANSA] == 1, "FP8 needs the first operand transposed"
        assert (a | b | d) % settings["alignment"] == 0, "an algorithm for memory that begins elsewhere"
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


def fake_cublaslt(patch):
    fake = FakeCublasLt()
    bindings = module(patch, "nvmath.bindings")
    bindings.cublasLt = fake
    patch.setitem(sys.modules, "nvmath.bindings.cublasLt", fake)
    return fake
