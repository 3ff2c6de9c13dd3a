import sys, tempfile, time, os, shutil, glob
from dataclasses import replace
from pathlib import Path
import torch
ROOT = Path.cwd()
for p in ("distributed", "regions", "serve"): sys.path.insert(0, str(ROOT / "benchmarks" / p))
from cells import CELLS
import argparse, re
from shared import planned
from loka.core.recording import record
from loka.core.timing import warm_up
from loka.nn.linears import signature
from loka.serve import freeze
name = sys.argv[1]; out = Path(os.environ["OUT"])
told = argparse.Namespace(narrowest=256, plan=None, batch_size=2048)
device = torch.device("cuda")
cell = replace(CELLS[f"serve_{name}_2048"], rows=512, name=name)
model = cell.model(device, tiny=False).bfloat16().eval()
requests, _ = cell.batch(device, tiny=False)
plan = planned(signature(model), told, device)
server = freeze(model, plan, calibration=[requests], buckets=[2048, 8192])
from torch._inductor import config
config.debug = False
path = out / "model.pt2"
t = time.time(); found = server.package(Path("/tmp/model.pt2"), batch=(1, 8192)); print("made", time.time() - t)
loaded = torch._inductor.aoti_load_package("/tmp/model.pt2", run_single_threaded=True)
import zipfile
z = zipfile.ZipFile("/tmp/model.pt2")
for n in z.namelist():
    if n.endswith(".wrapper.cpp") or (n.endswith(".cpp") and "wrapper" in n): (out / "wrapper.cpp").write_bytes(z.read(n))
print(z.namelist()[:60])
with torch.no_grad():
    for rows in (8192,):
        made = server.card.form.check_rows(device, rows)
        inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in made]
        stream = torch.cuda.Stream()
        warm_up(lambda: loaded(*inputs), stream)
        recording, _ = record(lambda: loaded(*inputs), device, stream)
        graph = server.current.replays._graphs[rows].recording
        for what, call in (("package", recording.replay), ("graph", graph.replay)):
            for _ in range(5): call()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                for _ in range(5): call()
                torch.cuda.synchronize()
            ev = sorted([e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA], key=lambda e: e.time_range.start)
            n = len(ev) // 5
            print(what, rows, "kernels", n)
            for e in ev[-n:]: print(f"  {e.time_range.elapsed_us():8.1f} {e.name[:110]}")
