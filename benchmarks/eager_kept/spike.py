"""What would an eager step take if a site's launches of a pass were one CUDA graph, kept by addresses?

    python benchmarks/eager_keyed/spike.py 2048 6144          # one GPU: host and whole time of six layers, three ways

Eagerly a converted layer costs its host some 0.9 ms more than nn.Linear. An eager loop's allocator hands out the same
addresses in every step, so the launches of a pass (memset, maxima, casts, GEMM) repeat to the byte. Here outputs are
allocated as ever, by the caller's allocator; their addresses, those of the operands, and the stream are the key of a
graph, which is captured when a key comes the second time. Another address: plain launches, as now. Nothing is shared
between calls, so no result can be overwritten. NOT YET RUN ON A GPU.
"""

import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "distributed"))
import torch
from shared import Tower, planned

import loka
from loka.core.numerics.reference import Quantized
from loka.kernels.triton import launch as L
from loka.nn import site_gemms, site_ops as S
from loka.nn.linears import signature

plain_forward, plain_backward = S.forward_parts, S.backward_parts
GRAPHS: dict = {}
SEEN: dict = {}
COUNTS = {"replayed": 0, "captured": 0, "plain": 0, "unknown": 0}
_state: dict = {}


def _recording(hp, row, column, health):
    """What `quantize_pair` recorded for operands alike, and its slots; None before it did."""
    transposed = hp.stride(1) != 1 and hp.stride(0) == 1
    if transposed:
        return None
    given = (hp, None, health)
    addresses = [-1 if t is None else t.data_ptr() for t in given]
    lying = [(addresses.index(a), a % L._ALIGNMENT) for a in addresses]
    found = L._RECORDINGS.get(((hp.shape, hp.stride(), hp.dtype, row, column)) + (hp.device.index, *lying))
    return None if found is None else (*found, given, addresses)


def _allocated(found, device):
    recording, slots, given, addresses = found
    tensors, addresses, zeroed = list(given), list(addresses), []
    for size, stride, dtype, zero in recording.allocations:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensors.append(tensor)
        addresses.append(tensor.data_ptr())
        if zero:
            zeroed.append(tensor)
    return recording, slots, tensors, addresses, zeroed


def _launch(made, stream):
    recording, _, _, addresses, zeroed = made
    for tensor in zeroed:
        tensor.zero_()
    for run, function, metadata, grid, values, pointers in recording.launches:
        values = list(values)
        for place, slot, offset in pointers:
            values[place] = addresses[slot] + offset
        run(grid[0], grid[1], 1, stream, function, metadata, None, None, None, *values)


def _copy(made, which, side):
    slot = made[1][which]
    if slot is None or side is None:
        return None
    data, scale = made[2][slot[0]], made[2][slot[1]]
    return Quantized(data, scale if scale.dim() == 2 else scale.view(1, 1), side.cast)


def _multiplied(run, a, b, out):
    fast = run.candidate.kernel.name == "torch_fast"
    if a.scale.numel() == 1 and b.scale.numel() == 1:
        torch._scaled_mm(a.data, b.data.t(), a.scale.view(()), b.scale.view(()), out_dtype=out.dtype, use_fast_accum=fast, out=out)
    else:
        torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale.t(), out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _run(key, launches, device):
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    key = (*key, stream)
    graph = GRAPHS.get(key)
    if graph is not None:
        COUNTS["replayed"] += 1
        graph.replay()
        return
    if key not in SEEN:
        SEEN[key] = True
        COUNTS["plain"] += 1
        launches(stream)
        return
    side, pool = _state.setdefault(stream, (torch.cuda.Stream(device), torch.cuda.graph_pool_handle()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        launches(side.cuda_stream)
        graph.capture_end()
    GRAPHS[key] = graph
    COUNTS["captured"] += 1
    graph.replay()


def forward_parts(x, weight, health, candidates, keep, hot=None):
    made = S._forward_of((x.shape[0], x.shape[1], weight.shape[0]), x.device, x.dtype, candidates, keep)
    rx = None if made is None else _recording(x, made.x[0], made.x[1], health)
    rw = None if made is None else _recording(weight, made.weight[0], made.weight[1], health)
    if rx is None or rw is None:
        COUNTS["unknown"] += 1
        return plain_forward(x, weight, health, candidates, keep, hot)
    mx, mw = _allocated(rx, x.device), _allocated(rw, x.device)
    low_x, kept_x = _copy(mx, 0, made.x[0]), _copy(mx, 1, made.x[1])
    low_w, kept_w = _copy(mw, 0, made.weight[0]), _copy(mw, 1, made.weight[1])
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

    def launches(stream):
        _launch(mx, stream)
        _launch(mw, stream)
        with torch.autocast("cuda", enabled=False):
            _multiplied(made.run, low_x, low_w, y)

    _run((id(mx[0]), id(mw[0]), *mx[3], *mw[3], y.data_ptr()), launches, x.device)
    return y, *S._parts(kept_x, x), *S._parts(kept_w, x)


def backward_parts(dy, x, x_scale, weight, weight_scale, health, names, want, features, weight_dtype):
    sides, device = (dy.shape[0], features, dy.shape[1]), dy.device
    given = (dy, x, x_scale, weight, weight_scale, health, names, want, features, weight_dtype)
    fi = S._backward_of(sides, device, dy.dtype, names[0], S.Gemm.GRAD_INPUT) if want[0] else None
    fw = S._backward_of(sides, device, weight_dtype, names[1], S.Gemm.GRAD_WEIGHT) if want[1] else None
    kept = (not want[0] or (fi and weight_scale.numel())) and (not want[1] or (fw and x_scale.numel()))
    rd = _recording(dy, fi[1] if fi else None, fw[1] if fw else None, health) if kept else None
    if rd is None:
        COUNTS["unknown"] += 1
        return plain_backward(*given)
    md = _allocated(rd, device)
    low, transposed = _copy(md, 0, fi[1] if fi else None), _copy(md, 1, fw[1] if fw else None)
    dx = torch.empty(sides[0], features, dtype=dy.dtype, device=device) if want[0] else dy.new_empty(0)
    dw = torch.empty(sides[2], features, dtype=weight_dtype, device=device) if want[1] else dy.new_empty(0, dtype=weight_dtype)

    def launches(stream):
        _launch(md, stream)
        with torch.autocast("cuda", enabled=False):
            if want[0]:
                _multiplied(fi[0], low, Quantized(weight, weight_scale, fi[0].casts[1]), dx)
            if want[1]:
                _multiplied(fw[0], transposed, Quantized(x, x_scale, fw[0].casts[1]), dw)

    held = (x.data_ptr(), x_scale.data_ptr(), weight.data_ptr(), weight_scale.data_ptr(), dx.data_ptr(), dw.data_ptr())
    _run((id(md[0]), *md[3], *held, want), launches, device)
    return dx, dw


def made(kind, width, batch, device):
    torch.manual_seed(0)
    model = Tower(width, 6).to(device)
    if kind != "bf16":
        told = Namespace(plan=None, narrowest=16, batch_size=batch)
        loka.convert(model, planned(signature(model), told, device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(batch, width, device=device)

    def step():
        keyed = kind == "keyed"
        site_gemms.forward_parts, site_gemms.backward_parts = (
            (forward_parts, backward_parts) if keyed else (plain_forward, plain_backward)
        )
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()

    return model, step


def timed(step, count):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * host / count, 1e3 * (time.perf_counter() - began) / count


def main():
    width, batch = int(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", 0)
    arms = {}
    for kind in ("bf16", "loka", "keyed"):
        arms[kind] = made(kind, width, batch, device)
        for _ in range(12):
            arms[kind][1]()
        torch.cuda.synchronize()
        print(kind, "ready", COUNTS, flush=True)
    equal = [torch.equal(a, b) for a, b in zip(arms["loka"][0].parameters(), arms["keyed"][0].parameters(), strict=True)]
    print("weights after 12 steps equal bit for bit:", all(equal), flush=True)
    for _ in range(5):
        for kind, (_, step) in arms.items():
            host, whole = timed(step, 30)
            print(f"{kind:6} host {host:.2f} whole {whole:.2f} ms", COUNTS if kind == "keyed" else "", flush=True)


main()
