import torch, sys, time, os, glob, shutil, copy
from torch import nn
from torch.profiler import profile, ProfilerActivity
from loka.compiler.packaged import PackagePass
from loka.compiler.joint_pass import RegionPass
from loka.core.records.report import HP
from loka.nn.fp8_weight import dequantized
from loka.nn.site_ops import site_forward
from loka.core.compiling import mend_compilers
mend_compilers()
SIDES=[(512,3456),(3456,512)]*3+[(1024,3456)]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for p,(n,k) in enumerate(SIDES):
            self.register_buffer(f"row{p}", (torch.randn(n,k,device="cuda")).to(torch.float8_e4m3fn))
            self.register_buffer(f"scale{p}", torch.full((max(n,k),),2.0**-6,device="cuda"))
            self.register_buffer(f"health{p}", torch.zeros(3,3,dtype=torch.int64,device="cuda"))
        for l in range(3): self.register_buffer(f"bias{l}", torch.randn(3456,device="cuda").bfloat16())
    def site(self,p,x):
        w=dequantized(getattr(self,f"row{p}"),getattr(self,f"scale{p}"),torch.bfloat16)
        return site_forward(x,w,getattr(self,f"health{p}"),str(p),"torch_fast:rowwise_e4m3_pow2",HP,HP,False,False,True)[0]
    def forward(self,dense,pooled):
        x0=torch.cat([dense.unsqueeze(1),pooled],dim=1).flatten(1); x=x0
        for l in range(3): x=x0*(self.site(2*l+1,self.site(2*l,x))+getattr(self,f"bias{l}"))+x
        return torch.relu(self.site(6,x)).float().sum(1)
m=Model(); R=8192
d,p=torch.randn(R,128,device="cuda").bfloat16(),torch.randn(R,26,128,device="cuda").bfloat16()
def show(tag, call):
    for _ in range(3): call()
    with profile(activities=[ProfilerActivity.CUDA]) as pr:
        for _ in range(5): call()
        torch.cuda.synchronize()
    evs=sorted((e for e in pr.events() if e.device_type==torch.autograd.DeviceType.CUDA), key=lambda e:e.time_range.start)
    n=len(evs)//5; evs=evs[2*n:3*n]
    print("==",tag,"launches",n,"sum",round(sum(e.device_time for e in evs),1))
    for e in evs: print(f"   {e.device_time:7.1f} {e.name[:120]}")
with torch.no_grad():
    t=time.time()
    rows=torch.export.Dim("rows",min=1,max=8192)
    prog=torch.export.export(m,(d[:1023],p[:1023]),dynamic_shapes=({0:rows},{0:rows}),strict=False)
    path=torch._inductor.aoti_compile_and_package(prog,package_path="/tmp/m.pt2",inductor_configs={"joint_custom_pre_pass":PackagePass(None)})
    print("aoti",round(time.time()-t,1),flush=True)
    f=torch._inductor.aoti_load_package(path,run_single_threaded=True)
    show("package",lambda: f(d,p))
    out=os.environ.get("OUT","/tmp/out"); os.makedirs(out,exist_ok=True)
    for i,x in enumerate(sorted(glob.glob("/tmp/ind/**/*.wrapper.cpp",recursive=True)+glob.glob("/tmp/ind/**/*kernel*.cpp",recursive=True))[:3]): shutil.copy(x,f"{out}/w{i}.cpp")
    t=time.time()
    torch._inductor.config.joint_custom_pre_pass=RegionPass(None)
    c=torch.compile(m,dynamic=False); c(d,p); print("compile",round(time.time()-t,1),flush=True)
    show("compiled",lambda: c(d,p))
