# ruff: noqa: E402
"""Prints the Triton kernels of a package's graph, written for a Hopper that is not there (a CPU build's fake tensors
say that they lie on one); fails where an op of LoKA is left, or a launch has a fixed number of rows."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))
from gpu import DRIVER

exec(DRIVER)
import torch
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from loka.compiler.packaged import PackagePass
from loka.core.records.report import HP
from loka.nn.fp8_weight import dequantized
from loka.nn.site_ops import site_forward

torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
SIDES = ((64, 32), (64, 64), (64, 64), (32, 64))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for place, (n, k) in enumerate(SIDES):
            self.register_buffer(f"row{place}", torch.empty(n, k, dtype=torch.float8_e4m3fn, device="cuda"))
            self.register_buffer(f"scale{place}", torch.empty(64, device="cuda"))
            self.register_buffer(f"health{place}", torch.empty(3, 3, dtype=torch.int64, device="cuda"))

    def site(self, place, x):
        weight = dequantized(getattr(self, f"row{place}"), getattr(self, f"scale{place}"), torch.bfloat16)
        health = getattr(self, f"health{place}")
        fast = "torch_fast:rowwise_e4m3_pow2"
        return site_forward(x, weight, health, str(place), fast, HP, HP, False, False, True)[0]

    def forward(self, x):
        y = self.site(1, torch.relu(self.site(0, x)))
        blocks = y.float().unflatten(-1, (-1, 64))
        y = torch.relu(nn.functional.rms_norm(blocks, (64,), eps=1e-6).flatten(-2).to(y.dtype))
        y = nn.functional.silu(nn.functional.layer_norm(self.site(2, y), (64,)))
        return self.site(3, y).float().sum(1)


with FakeTensorMode(), torch.no_grad():
    model, x = Model(), torch.empty(1023, 32, dtype=torch.bfloat16, device="cuda")
    rows = torch.export.Dim("rows", min=1, max=1024)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False)
graph = program.run_decompositions(select_decomp_table()).graph
mode = next(node.meta["val"].fake_mode for node in graph.nodes if node.op == "placeholder")
with mode, mock.patch.object(torch.Tensor, "copy_", lambda self, _: self):  # which looks for the GPU
    PackagePass(None)(graph)
graph.lint()
assert not any("loka" in str(node.target) for node in graph.nodes), graph
for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
    assert isinstance(node.kwargs["grid"][0][0], torch.fx.Node), node.kwargs
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    print(getattr(kernel, "fn", kernel).__name__)
constants = graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
ones = [constant for constant in constants if constant.args[1] == 1.0 and constant.users]
readers = [user.target for one in ones for user in one.users]
assert readers == [torch.ops.prims.inductor_force_stride_order.default], ones  # else each GEMM would fill its own
gemms = graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
assert len(gemms) > 1, gemms
