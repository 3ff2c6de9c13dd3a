"""One eager loop in many ways: are the weights those of single launches, bit for bit, and what was captured?"""
import hashlib, os, subprocess, sys, time
WAYS = {
    "single": {}, "default": {}, "asked": {}, "blocking": {"CUDA_LAUNCH_BLOCKING": "1"},
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "loader": {}, "profiled": {}, "nocache": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "checkpoint": {}, "reentrant": {}, "side": {}, "threads": {}, "fork": {}, "accumulate": {}, "synced": {},
}
def work(way):
    import threading, contextlib
    import torch
    import loka
    from loka.kernels.triton import graphs
    from sites import convert_layer
    from torch.utils.checkpoint import checkpoint
    names = ("torch_fast:rowwise_e4m3_pow2", "torch_fast:rowwise_e4m3_pow2", "torch:rowwise_e4m3_pow2")
    if way == "single": loka.nn.eager_graphs(False)
    if way == "asked": loka.nn.eager_graphs()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.SiLU()) for _ in range(4))).cuda()
    for block in model: convert_layer(block[0], names)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 768, 512, generator=generator)
    batches = (x.cuda() for x in data)
    if way == "loader":
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=None, num_workers=2, pin_memory=True)
        batches = (x.cuda(non_blocking=True) for x, in loader)
    stop = threading.Event()
    if way == "threads": 
        def sync():
            while not stop.wait(0.001): torch.cuda.synchronize()
        threading.Thread(target=sync).start()
    stream = torch.cuda.stream(torch.cuda.Stream()) if way == "side" else contextlib.nullcontext()
    profile = torch.profiler.profile() if way == "profiled" else contextlib.nullcontext()
    torch.cuda.synchronize()
    with stream, profile:
        for turn, x in enumerate(batches):
            with torch.autocast("cuda", torch.bfloat16):
                if way in ("checkpoint", "reentrant"):
                    y = x.requires_grad_()
                    for block in model: y = checkpoint(block, y, use_reentrant=way == "reentrant")
                else:
                    y = model(x)
            y.float().square().mean().backward()
            if way == "synced": torch.cuda.synchronize()
            optimizer.step(); optimizer.zero_grad()
            if way == "fork" and turn == 20:
                child = os.fork()
                if not child: sys.exit(0)
                print("fork", os.waitpid(child, 0)[1])
    torch.cuda.synchronize(); stop.set()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]
    print(f"{way:12} {digest} captures {graphs._kept.captures} launches {graphs._kept.launches} refused {graphs._kept.refused} MB {torch.cuda.max_memory_reserved() >> 20}", flush=True)
if len(sys.argv) > 1: work(sys.argv[1])
else:
    running = {w: subprocess.Popen([sys.executable, __file__, w], env=os.environ | e, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for w, e in WAYS.items()}
    for w, p in running.items():
        try: out, _ = p.communicate(timeout=90)
        except subprocess.TimeoutExpired: p.kill(); out = "TIMEOUT"
        print(out[-700:].strip() if p.returncode == 0 else f"{w} rc {p.returncode}: {out[-900:]}", flush=True)
