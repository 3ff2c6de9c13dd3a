import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edge_programs import CASES
from gpu import DRIVER

pytest.importorskip("triton", reason="needs triton")

SCRIPT = f"""{DRIVER}
import itertools, json, sys

sys.path.insert(0, sys.argv[1])
from edge_programs import CASES
from loka.kernels.edge.op import lying
from loka.kernels.edge.triton import program_kernels

found = []

def compiled(launch, arguments, programs, registers=0):
    kernel = launch.kernel.warmup(*launch._values(arguments), grid=(1,), **launch._options(registers))
    found.append((name, kernel.metadata.shared))

program_kernels.Launch.run = compiled
program_kernels.Launch.resident = lambda launch, arguments: (132, 0)
program_kernels.Launch.spilled = lambda launch, *_: 0
for name, many in itertools.product(CASES, (0, 1 << 40)):
    program_kernels.TILE["many"] = many
    case, rows = CASES[name](1024), 256
    leaves = lying(case.program, case.leaves(rows, torch.device("cpu")), rows)
    given = torch.ones(rows, 1), torch.ones(rows, 1), torch.ones(2)
    program_kernels.run_program_fused(case.program, leaves, rows, *given)
print(json.dumps(found))
"""
SHARED = 227 * 1024


@pytest.mark.slow  # a minute
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there, in test_triton_edge.py")
def test_every_program_compiles_and_fits():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, _ in found} == set(CASES)
    assert all(shared <= SHARED for _, shared in found), found
