import sys, os
from pathlib import Path
sys.argv=[sys.argv[0]]+sys.argv[1:]
which=sys.argv[1]; ARGS=list(sys.argv)
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"]="1"
import torch
import loka.kernels.edge.op as OP
import loka.kernels.edge.program as PR
from loka.kernels.edge.program import Kind
import loka.kernels.custom_op as CO
old = CO.registered
import importlib
import torch.utils._pytree
# patch by re-registering CPU kernel
lib = torch.library.Library("loka","FRAGMENT")
seen=[]
import torch._inductor.config as IC
def spy(leaves, rows, i, g, t, program):
    p=PR.program_of(program)
    for leaf, kind in zip(leaves,p.leaves):
        if kind is Kind.FULL:
            try: v=leaf.view(rows,p.features); bad = not (v.stride(1)==1 or p.features==1)
            except RuntimeError: bad=True
        else: bad = not leaf.is_contiguous()
        if bad: print("COPY", kind, leaf.dtype, tuple(leaf.shape), leaf.stride(), "rows", rows, p.features, "outs", p.outputs, flush=True)
    return OP._edge(leaves, rows, i, g, t, program)
import warnings; warnings.simplefilter("ignore")
lib.impl("edge", spy, "CPU", allow_override=True) if "allow_override" in lib.impl.__code__.co_varnames else lib.impl("edge", spy, "CPU")
sys.path.insert(0,"benchmarks/unseen"); sys.path.insert(0,"benchmarks/regions")
sys.argv=["x","--list"]
import io, contextlib
import cells as C0
ZOO=dict(C0.CELLS)
with contextlib.redirect_stdout(io.StringIO()):
    import unseen
import cells
from arms import How, build, plan_of, ON_CPU
cell={**ZOO,**cells.CELLS}[which]
how=How(device=torch.device("cpu"), tiny=True, candidates=ON_CPU)


import loka
sys.path.insert(0,"tests")
import importlib.util as IU
sp=IU.spec_from_file_location('models2','tests/models.py'); keep=sys.modules.pop('models'); m2=IU.module_from_spec(sp); sys.modules['models']=m2; sp.loader.exec_module(m2)
from compiler.converted import plan_for, converted
sys.modules['models']=keep
from arms import arm_of, _prepared
model=_prepared(cell,how)
inputs,_=cell.batch(how.device,tiny=True)
force={} if len(ARGS)<3 else dict(x.split("=") for x in ARGS[2:])
plan=plan_for(model,*inputs,force=force)
model=converted(model,plan)
arm=arm_of(model, torch.compile(model), cell, how)

import loka.compiler.lower as LW
if os.environ.get("HOLD")=="0": LW.hold=lambda g: None
from torch._inductor import metrics
metrics.reset()
metrics.num_bytes_accessed=0
import collections
arm.step()
print("KERNELS", which, os.environ.get("HOLD"), metrics.generated_kernel_count, "bytes", metrics.num_bytes_accessed, flush=True)

m=arm.model
r=loka.regions(m)
print(r)

