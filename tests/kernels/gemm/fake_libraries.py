"""Stand-ins for the kernel libraries, on CPU tensors: the documented signatures, reference arithmetic.

Each checks what the real one checks (types, shapes, strides, alignment) and reads its operands the
way the real one documents, so an adapter that swaps arguments or lays scales out wrongly fails.
"""

import sys
from types import ModuleType

import torch

E4M3 = torch.float8_e4m3fn


def module(patch, name, **content):
    made = ModuleType(name)
    made.__dict__.update(content)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent] if parent in sys.modules else module(patch, parent), child, made)
    patch.setitem(sys.modules, name, made)
    return made


def grouped(scale, rows, columns):
    """Scales [R', C'] spread over [rows, columns] in groups of ceil(rows / R') and 128."""
    by_row = rows if scale.shape[0] == 1 else 1 if scale.shape[0] == rows else 128
    return scale.repeat_interleave(by_row, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def product(a, b, scale_a, scale_b):
    return (a.float() * scale_a) @ (b.float() * scale_b).t()


def fake_torchao(patch):
    def addmm_float8_unwrapped(
        a_data, a_scale, b_data, b_scale, output_dtype, output_scale=None, bias=None, use_fast_accum=False
    ):
        assert output_scale is None
        assert bias is None
        assert a_data.stride(1) == 1
        assert b_data.stride(0) == 1
        rowwise = a_scale.shape == (a_data.shape[0], 1) and b_scale.shape == (1, b_data.shape[1])
        assert rowwise or a_scale.shape == b_scale.shape == ()
        out = product(a_data, b_data.t(), 1 / a_scale, (1 / b_scale).t() if rowwise else 1 / b_scale)
        return (out.bfloat16() if rowwise else out).to(output_dtype)

    def readable(scale, rows, row_stride, columns, column_stride):
        last = scale.storage_offset() + (rows - 1) * row_stride + (columns - 1) * column_stride
        assert last < scale.untyped_storage().nbytes() // 4, "a tile's scales lie outside of memory"

    def gemm_128x128(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32):
        (m, k), n = a.shape, b.shape[1]
        assert a.stride(1) == b.stride(0) == a_s.stride(0) == b_s.stride(0) == 1
        assert a_s.shape == (m, k // 128)
        assert b_s.shape == (k // 128, -(-n // 128))
        readable(a_s, -(-m // 256) * 256, a_s.stride(0), k // 128, a_s.stride(1))
        readable(b_s, k // 128, b_s.stride(0), -(-n // 256) * 2, b_s.stride(1))
        return product(a, b.t(), grouped(a_s, m, k), grouped(b_s.t(), n, k)).to(out_dtype)

    def gemm_128x1(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32):
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


def fake_fbgemm(patch, calls):
    """The ops on CPU tensors, noting (op, use_fast_accum). Keep what is returned alive."""

    def operands(a, b, n_multiple=8):
        assert a.dtype == b.dtype == E4M3
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a.shape[1] == b.shape[1]
        assert a.shape[1] % 16 == 0, "cutlass cannot implement"
        assert b.shape[0] % n_multiple == 0, "cutlass cannot implement"

    def tensorwise(a, b, scale, use_fast_accum=True):
        operands(a, b)
        assert scale.numel() == 1
        calls.append(("f8f8bf16", use_fast_accum))
        return (a.float() @ b.float().t() * scale).bfloat16()

    def rowwise(a, b, x_scale, w_scale, bias=None, use_fast_accum=True):
        operands(a, b)
        assert bias is None
        assert (x_scale.shape, w_scale.shape) == ((a.shape[0],), (b.shape[0],))
        assert x_scale.is_contiguous()
        assert w_scale.is_contiguous()
        calls.append(("f8f8bf16_rowwise", use_fast_accum))
        return product(a, b, x_scale[:, None], w_scale[:, None]).bfloat16()

    def blockwise(a, b, x_scale, w_scale, block_m=128, block_n=128, block_k=128):
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

    def groupwise(a, b, x_scale, w_scale):
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
    library = torch.library.Library("fbgemm", "FRAGMENT")
    for (name, schema), function in zip(_FBGEMM.items(), functions, strict=True):
        if not hasattr(torch.ops.fbgemm, name):  # the real one may be loaded
            library.define(name + schema)
        library.impl(name, function, "CPU")
    module(patch, "fbgemm_gpu.experimental.gen_ai")
    return library


def fake_deep_gemm(patch, calls):
    def tma_aligned(scale, rows):
        assert scale.stride() == (1, -(-rows // 4) * 4), "the library would launch a transpose"
        assert scale.data_ptr() % 16 == 0

    def fp8_gemm_nt(
        a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="", disable_ue8m0_cast=False
    ):
        (m, k), n = a[0].shape, b[0].shape[0]
        assert a[0].dtype == b[0].dtype == E4M3
        assert a[0].stride(1) == b[0].stride(1) == 1
        assert a[1].shape == (m, k // 128)
        tma_aligned(a[1], m)
        if recipe[1] == 1:
            assert recipe == (1, 1, 128)
            assert b[1].shape == (n, k // 128)
            tma_aligned(b[1], n)
            assert d.dtype == torch.float32
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
