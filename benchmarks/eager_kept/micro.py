import ctypes, time, sys, torch
from pathlib import Path
sys.path.insert(0, "benchmarks/distributed"); sys.path.insert(0, "tests")
dev = torch.device("cuda", 0)
import loka
from loka.kernels.triton import launch as L
from loka.kernels.quantize.quantizer import quantize_pair
from loka.nn import site_ops as S
from loka.compiler.joint_sites import IN_REGIONS
N = 3000
def t(name, f, n=N):
    for _ in range(50): f()
    torch.cuda.synchronize(); b = time.perf_counter()
    for _ in range(n):
        f()
    e = time.perf_counter() - b
    torch.cuda.synchronize()
    print(f"{name:44} {1e6*e/n:8.2f} us", flush=True)
x = torch.randn(64, 64, device=dev, dtype=torch.bfloat16)
w = torch.randn(64, 64, device=dev)
u = torch.empty(1 << 16, dtype=torch.uint8, device=dev)
h = torch.zeros(3, 3, dtype=torch.int64, device=dev)
t("pass", lambda: None)
t("torch.empty(64,64,fp8)", lambda: torch.empty(64, 64, dtype=torch.float8_e4m3fn, device=dev))
t("torch.empty_strided", lambda: torch.empty_strided((64, 64), (64, 1), dtype=torch.float8_e4m3fn, device=dev))
t("x.new_empty", lambda: x.new_empty(64, 64))
t("torch.empty_like", lambda: torch.empty_like(x))
t("torch._C alloc raw", lambda: torch.cuda.caching_allocator_alloc(512, dev.index) and None, 200)
t("torch.empty uint8", lambda: torch.empty(4096, dtype=torch.uint8, device=dev))
t("torch.zeros(1,int32)", lambda: torch.zeros(1, dtype=torch.int32, device=dev))
z = torch.zeros(4, dtype=torch.int32, device=dev)
t("zero_", lambda: z.zero_())
t("as_strided", lambda: torch.as_strided(u, (64, 64), (64, 1), 128))
t("view(dtype)", lambda: u.view(torch.float8_e4m3fn))
t("slice", lambda: u[128:4224])
t("t()", lambda: x.t())
t("data_ptr", lambda: x.data_ptr())
t("x.shape,x.stride(),x.dtype", lambda: (x.shape, x.stride(), x.dtype))
t("hash shape", lambda: hash((x.shape, x.stride(), x.dtype)))
t("current raw stream", lambda: torch._C._cuda_getCurrentRawStream(0))
t("is_current_stream_capturing", lambda: torch.cuda.is_current_stream_capturing())
t("is_autocast_enabled", lambda: torch.is_autocast_enabled("cuda"))
def ac():
    with torch.autocast("cuda", enabled=False): pass
t("autocast(False) context", ac)
cu = ctypes.CDLL("libcuda.so.1")
ms = cu.cuMemsetD8Async; ms.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
st = torch._C._cuda_getCurrentRawStream(0); p = z.data_ptr()
t("cuMemsetD8Async ctypes", lambda: ms(p, 0, 16, st))
xb, wb = x, w.bfloat16()
t("bf16 mm", lambda: torch.mm(xb, wb.t()))
t("F.linear bf16", lambda: torch.nn.functional.linear(xb, wb))
low = torch.empty(64, 64, dtype=torch.float8_e4m3fn, device=dev); sc = torch.ones(64, 1, device=dev); s1 = torch.ones((), device=dev)
o = torch.empty(64, 64, dtype=torch.bfloat16, device=dev)
t("_scaled_mm rowwise", lambda: torch._scaled_mm(low, low.t(), sc, sc.t(), out_dtype=torch.bfloat16, use_fast_accum=True))
t("_scaled_mm rowwise out=", lambda: torch._scaled_mm(low, low.t(), sc, sc.t(), out_dtype=torch.bfloat16, use_fast_accum=True, out=o))
lt, sct = low.t(), sc.t()
t("_scaled_mm rowwise views ahead", lambda: torch._scaled_mm(low, lt, sc, sct, out_dtype=torch.bfloat16, use_fast_accum=True))
t("aten._scaled_mm.default", lambda: torch.ops.aten._scaled_mm.default(low, lt, sc, sct, None, None, torch.bfloat16, True))
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b): ctx.save_for_backward(a, b); return a
    @staticmethod
    def backward(ctx, g): a, b = ctx.saved_tensors; return g, None
xr = torch.randn(64, 64, device=dev, dtype=torch.bfloat16, requires_grad=True)
t("autograd.Function forward", lambda: F.apply(xr, w))
def fb():
    y = F.apply(xr, w); y.backward(x); xr.grad = None
t("autograd.Function forward+backward", fb, 1000)
def lin():
    y = torch.nn.functional.linear(xr, wb); y.backward(x); xr.grad = None
t("F.linear forward+backward (dx only)", lin, 1000)
names = IN_REGIONS; print(names)
layer = torch.nn.Linear(2048, 2048, device=dev)
X = torch.randn(256, 2048, device=dev, dtype=torch.bfloat16)
c = tuple(names)
keep = (True, True)
t("forward_parts", lambda: S.forward_parts(X, layer.weight.data, h, c, keep), 500)
made = S._forward_of((256, 2048, 2048), dev, torch.bfloat16, c, keep)
t("  _forward_of", lambda: S._forward_of((X.shape[0], X.shape[1], 2048), X.device, X.dtype, c, keep))
t("  quantize_pair x", lambda: quantize_pair(X, row=made.x[0], column=made.x[1], health=h), 500)
t("  quantize_pair w", lambda: quantize_pair(layer.weight.data, row=made.weight[0], column=made.weight[1], health=h), 500)
a, _ = quantize_pair(X, row=made.x[0], column=made.x[1], health=h); b, _ = quantize_pair(layer.weight.data, row=made.weight[0], column=made.weight[1], health=h)
t("  run", lambda: made.run(a, b), 500)
t("  candidate.run", lambda: made.run.candidate.run(a, b, torch.bfloat16), 500)
for k, (r, slots) in L._RECORDINGS.items():
    print("recording", k[0], [(a.size, str(a.dtype), a.zeroed) for a in r.allocations], len(r.launches))
y, kx, xs, kw, ws = S.forward_parts(X, layer.weight.data, h, c, keep)
dy = torch.randn_like(y)
bw = lambda: S.backward_parts(dy, kx, xs, kw, ws, h, c[1:], (True, True), 2048, torch.float32)
t("backward_parts", bw, 500)
# launches of one recording: triton run against a graph by the driver
import loka.kernels.triton.launch as LL
key, (rec, slots) = next((k, v) for k, v in L._RECORDINGS.items() if k[0] == X.shape)
given = (X, None, h)
def addrs():
    tensors = list(given); ad = [-1 if q is None else q.data_ptr() for q in given]
    for size, stride, dtype, zero in rec.allocations:
        q = torch.empty_strided(size, stride, dtype=dtype, device=dev); tensors.append(q); ad.append(q.data_ptr())
    return tensors, ad
tensors, ad = addrs()
def launches(stream):
    for q, al in zip(tensors[3:], rec.allocations):
        if al.zeroed: ms(q.data_ptr(), 0, q.numel() * q.element_size(), stream)
    for run, function, metadata, grid, plain, pointers in rec.launches:
        values = list(plain)
        for place, slot, offset in pointers: values[place] = ad[slot] + offset
        run(grid[0], grid[1], 1, stream, function, metadata, None, None, None, *values)
t("memset+launches by triton run", lambda: launches(st), 1000)
stream = ctypes.c_void_p(); assert cu.cuStreamCreate(ctypes.byref(stream), 1) == 0
def capture(f):
    g, e = ctypes.c_void_p(), ctypes.c_void_p()
    assert cu.cuStreamBeginCapture_v2(stream, 1) == 0
    f(stream.value)
    assert cu.cuStreamEndCapture(stream, ctypes.byref(g)) == 0
    assert cu.cuGraphInstantiateWithFlags(ctypes.byref(e), g, ctypes.c_ulonglong(0)) == 0
    cu.cuGraphDestroy(g)
    return e
b0 = time.perf_counter(); e = capture(launches); print("capture us", 1e6 * (time.perf_counter() - b0))
b0 = time.perf_counter(); e2 = capture(lambda s: (launches(s), launches(s))); print("capture of two us", 1e6 * (time.perf_counter() - b0))
gl = cu.cuGraphLaunch; gl.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
t("cuGraphLaunch ctypes (3 nodes)", lambda: gl(e, st), 1000)
t("cuGraphLaunch ctypes (6 nodes)", lambda: gl(e2, st), 1000)
g = torch.cuda.CUDAGraph(); s2 = torch.cuda.Stream()
with torch.cuda.graph(g, stream=s2): launches(s2.cuda_stream)
t("CUDAGraph.replay (3 nodes)", g.replay, 1000)
free0 = torch.cuda.mem_get_info()[0]
keep_ = [capture(lambda s: (launches(s), launches(s))) for _ in range(300)]
for q in keep_: gl(q, st)
torch.cuda.synchronize()
print("memory per graph KB", (free0 - torch.cuda.mem_get_info()[0]) / 300 / 1024)
