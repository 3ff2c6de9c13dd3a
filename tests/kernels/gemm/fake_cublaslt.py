"""A stand-in for the functions of cuBLASLt, on CPU tensors; see fake_libraries.py."""

import ctypes

import numpy as np
import torch
from fake_libraries import E4M3

from loka.kernels.gemm.adapters import cublaslt_c
from loka.kernels.gemm.adapters.cublaslt_c import Desc, Preference, Scale

_SIZES = {  # bytes, as cublasLt.h says
    **dict.fromkeys((Desc.TRANSA, Desc.A_SCALE_MODE, Desc.B_SCALE_MODE), 4),
    **dict.fromkeys((Desc.A_SCALE_POINTER, Desc.B_SCALE_POINTER), 8),
    Desc.FAST_ACCUM: 1,
}
_STATUS = {7: b"CUBLAS_STATUS_INVALID_VALUE", 15: b"CUBLAS_STATUS_NOT_SUPPORTED"}
_TYPES = {28: E4M3, 29: torch.float8_e5m2, 14: torch.bfloat16, 2: torch.float16, 0: torch.float32}


def at(address, dtype, count):
    """The memory there, as a tensor that writes through."""
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


class FakeCublasLt:
    """cuBLASLt: column-major, handles are numbers. `calls`: (algorithm, fast, workspace). `unknown`: attributes that
    its version lacks. `workspace`: bytes that an algorithm asks for, times its index.
    """

    def __init__(self):
        self.objects = {}
        self.searches = 0
        self.calls = []
        self.found = 3
        self.unknown = ()
        self.workspace = 64

    def functions(self):
        destroy = self.objects.__delitem__
        found = {
            "Create": lambda made: self._make(made, 99),
            "MatmulDescCreate": self.describe,
            "MatmulDescSetAttribute": self.set_of_desc,
            "MatrixLayoutCreate": self.lay_out,
            "MatmulPreferenceCreate": self._new,
            "MatmulPreferenceSetAttribute": self.set_of_preference,
            "MatmulAlgoGetHeuristic": self.search,
            "Matmul": self.matmul,
            **dict.fromkeys(("MatmulDescDestroy", "MatrixLayoutDestroy", "MatmulPreferenceDestroy"), destroy),
        }
        assert set(found) == set(cublaslt_c._FUNCTIONS)
        return {**found, "GetStatusName": _STATUS.__getitem__, "GetVersion": lambda: 130000}

    def _make(self, made, number):
        made._obj.value = number

    def _new(self, made, **content):
        number = 1000 + self.searches * 100 + len(self.objects)
        while number in self.objects:
            number += 1
        self.objects[number] = content
        self._make(made, number)

    def describe(self, made, compute_type, scale_type):
        assert (compute_type, scale_type) == (68, 0)
        self._new(made)

    def lay_out(self, made, type, rows, columns, ld):
        assert ld == rows
        self._new(made, dtype=_TYPES[type], rows=rows, columns=columns)

    def set_of_desc(self, owner, attribute, buffer, size):
        assert size == _SIZES[Desc(attribute)]
        if attribute in self.unknown:
            return 7
        self.objects[owner][Desc(attribute)] = int.from_bytes(ctypes.string_at(buffer, size), "little")
        return 0

    def set_of_preference(self, owner, attribute, buffer, size):
        assert size == (8 if attribute == Preference.MAX_WORKSPACE_BYTES else 4)
        self.objects[owner][Preference(attribute)] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    def search(self, handle, desc, a, b, c, d, preference, asked, *into):
        assert handle == 99
        self.searches += 1
        wishes = self.objects[preference]
        assert wishes[Preference.REDUCTION_SCHEME_MASK] == 2
        assert set(wishes) == set(Preference)
        assert wishes[Preference.MIN_ALIGNMENT_A_BYTES] >= 16
        self.objects[desc]["alignment"] = wishes[Preference.MIN_ALIGNMENT_A_BYTES]
        if not self.found:
            return 15
        dtype = cublaslt_c.HEURISTIC_RESULT
        room = (ctypes.c_uint8 * (asked * dtype.itemsize)).from_address(into[0])
        results = np.frombuffer(room, dtype=dtype)  # writes through
        for index in range(self.found):
            results["algo"][index, 0] = 40 + index
            results["workspace_size"][index] = self.workspace * index
            results["state"][index] = 15 if index == 1 else 0  # the second one fails its check
        ctypes.c_int.from_address(into[1]).value = self.found
        return 0

    def _scaled(self, layout, address, mode, pointer):
        """A matrix [K, side] in float32 with its scales on, read from memory as cuBLASLt documents."""
        matrix = self.objects[layout]
        k, side = matrix["rows"], matrix["columns"]
        assert address % 16 == 0
        assert pointer % 16 == 0, "NOT_SUPPORTED"
        values = at(address, matrix["dtype"], k * side).view(side, k).t().float()
        groups = -(-k // 128)
        if mode == Scale.SCALAR_32F:
            return values * at(pointer, torch.float32, 1)
        if mode == Scale.OUTER_VEC_32F:
            return values * at(pointer, torch.float32, side)
        if mode == Scale.VEC128_32F:
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
        assert settings[Desc.TRANSA] == 1, "FP8 needs the first operand transposed"
        assert (a | b | d) % settings["alignment"] == 0, "an algorithm for memory that begins elsewhere"
        modes = [settings.get(each, Scale.SCALAR_32F) for each in (Desc.A_SCALE_MODE, Desc.B_SCALE_MODE)]
        first = self._scaled(adesc, a, modes[0], settings[Desc.A_SCALE_POINTER])
        second = self._scaled(bdesc, b, modes[1], settings[Desc.B_SCALE_POINTER])
        out = self.objects[ddesc]
        assert (out["rows"], out["columns"]) == (first.shape[1], second.shape[1])
        assert (at(alpha, torch.float32, 1).item(), at(beta, torch.float32, 1).item()) == (1, 0)
        assert (c, cdesc) == (d, ddesc)
        assert bool(workspace) == bool(workspace_size)
        memory = at(d, out["dtype"], out["rows"] * out["columns"]).view(out["columns"], out["rows"])
        memory.copy_((first.t() @ second).t())
        used = ctypes.c_uint64.from_address(algo).value
        self.calls.append((used, bool(settings[Desc.FAST_ACCUM]), workspace_size))


def fake_cublaslt(patch):
    fake = FakeCublasLt()
    patch.setattr(cublaslt_c, "_functions", fake.functions)
    return fake
