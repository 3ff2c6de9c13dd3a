import os
import subprocess
import sys

import pytest
import torch
from gpu import DRIVER
from torch._inductor import config
from torch._inductor.runtime.autotune_cache import AutotuneCache

from loka.compiler import install
from loka.core.compiling import compile_in_place, mend_compilers

pytest.importorskip("triton", reason="needs triton")

SCRIPT = f"""{DRIVER}
import sys
from torch._inductor import config
from torch._inductor.graph import GraphLowering

config.cpu_backend, config.force_disable_caches = "triton", True

class Told(Exception):
    pass

def told(graph):
    print(graph.codegen()[0].value)
    raise Told

GraphLowering.compile_to_module = told

class Model(torch.nn.Module):
    def forward(self, x, weight):
        y = x.relu()
        product = y @ weight  # for which y is stored
        return product, y - y.mean(-1, keepdim=True)  # a loop adds y up, and the next reads it back

def compiled(model):
    try:
        model(torch.randn(64, 5000), torch.randn(5000, 8))
    except torch._inductor.exc.InductorError as error:
        assert "Told" in str(error), error

def by_loka(model):
    from loka.core.compiling import compile_in_place

    return compile_in_place(model)

compiled({{"torch": torch.compile, "loka": by_loka}}[sys.argv[1]](Model()))
"""


# By torch alone: whether there is something to mend.
@pytest.mark.slow
@pytest.mark.parametrize(("by", "barriers"), [("loka", 1), ("torch", 0)])
def test_a_kernel_waits_before_it_reads_back(by, barriers):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, by], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    stored, read = (
        next(at for at, line in enumerate(lines) if f"tl.{what}(out_ptr0" in line) for what in ("store", "load")
    )
    assert stored < read, "torch stores y, and a later loop reads it"
    assert sum("tl.debug_barrier()" in line for line in lines[stored:read]) == barriers
    assert done.stdout.count("tl.debug_barrier()") == barriers, "nowhere else"


@pytest.mark.parametrize("entry", [install, lambda: compile_in_place(torch.nn.ReLU())])
def test_caches_of_graphs_are_told_and_picks_keep_their_names(entry):
    """A worker, which names the file of a pick that this process will read, knows nothing of LoKA."""
    with config.patch(unsafe_marked_cacheable_functions={"theirs": "1"}):
        before, pick = config.save_config_portable(), AutotuneCache._prepare_key("kernel.py")
        entry()
        after = config.save_config_portable()
        assert after != before
        assert config.unsafe_marked_cacheable_functions["theirs"] == "1"
        mend_compilers()
        assert config.save_config_portable() == after
        assert AutotuneCache._prepare_key("kernel.py") == pick
