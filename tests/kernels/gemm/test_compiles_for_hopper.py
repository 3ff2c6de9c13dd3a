"""What no interpreter sees: the kernel as Triton compiles it for sm_90, on a machine without a GPU.

The compiler refuses what the interpreter lets pass (types that differ between branches, shapes of tiles,
inline assembly), and tells how much shared memory a program takes, of which a multiprocessor has 227 KiB.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from gpu import DRIVER

pytest.importorskip("triton", reason="needs triton")

SCRIPT = """
import itertools, json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from loka.kernels.gemm.epilogue import Activation
from loka.kernels.gemm.triton import gemm

names = gemm._gemm.arg_names
KINDS = {"float8_e4m3fn": "fp8e4nv", "bfloat16": "bf16", "float16": "fp16"}

def built(config, norm, keep, rows, activation, dtype):
    width = max(norm, config.block_n)
    part = config.block_m, width // config.parts
    tile = lambda kind, sides: f"tensordesc<{kind}[{sides[0]},{sides[1]}]>"
    types = {
        "a": tile("fp8e4nv", (config.block_m, config.block_k)), "w": tile("fp8e4nv", (width, config.block_k)),
        "out": tile(KINDS[dtype], part), "z": tile("u8" if keep else KINDS[dtype], part),
        **dict.fromkeys(("inverse_ptr", "steps_ptr", "scales_ptr", "scale_a_ptr", "scale_w_ptr"), "*fp32"),
        **dict.fromkeys(("rows", "columns", "inner"), "i32"),
    }
    constants = dict(
        NORM=norm, ACTIVATION=gemm._ACTIVATIONS[activation].value, INVERSE=16.0, EPS=1e-5, VANISHING=1e-4, KEEP=keep,
        ROWS=rows, OUT=gemm._DTYPES[getattr(torch, dtype)], FAST=True, HARDWARE=True, TMA=True,
        BLOCK_M=config.block_m, BLOCK_N=width, BLOCK_K=config.block_k, PARTS=config.parts, GROUP=config.group,
        FLATTEN=config.flatten, PROGRAMS=132,
    )
    pointers = [place for place, name in enumerate(names) if types.get(name) == "*fp32"]
    source = ASTSource(
        fn=gemm._gemm,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    options = dict(num_warps=config.warps, num_stages=config.stages)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)

found = {}
for name, norm, keep, rows, activation, dtype in json.loads(sys.argv[1]):
    kernel = built(gemm.CONFIGS[name], norm, keep, rows, Activation(activation), dtype)
    text = kernel.asm["ptx"]
    shared = kernel.metadata.shared * gemm.CONFIGS[name].per_sm
    found[f"{name} {norm} {activation} {dtype}"] = shared, "wgmma.mma_async" in text, ".local" in text
print(json.dumps(found))
"""
SHARED = 227 * 1024
LOW = "float8_e4m3fn"
CHOSEN = [  # all that `choose` may give: name, block, is Z kept, are scales of rows, activation, dtype of the result
    ("one pipeline", 256, True, True, "hard_swish", LOW),
    ("one pipeline", 256, True, False, "hard_swish", "bfloat16"),
    ("whole", 128, False, False, "relu", LOW),
    ("whole", 256, False, True, "hard_swish", "float16"),
    ("low, in halves", 64, True, False, "gelu", LOW),
    ("low, in halves", 256, True, False, "relu", "bfloat16"),
    ("low", 256, False, True, "swish", LOW),
    ("low", 256, False, False, "hard_swish", "bfloat16"),
    ("short sums", 256, True, True, "hard_swish", LOW),
    ("short sums", 128, True, False, "swish", LOW),
]


@pytest.mark.slow  # half a minute
@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs there, in test_triton_gemm.py")
def test_each_chosen_configuration_compiles_and_fits():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CHOSEN)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(CHOSEN)
    for name, (shared, by_tensor_cores, spills) in found.items():
        assert shared <= SHARED, name
        assert by_tensor_cores, name
        assert not spills, name


IN_FLIGHT = """
import inspect, json, re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from loka.kernels.gemm.triton import int8_gemm
from loka.kernels.triton import in_flight
from loka.kernels.triton.source import compiled

floats = inspect.getsource(int8_gemm._multiply.fn).replace("tl.int32", "tl.float32")
FLOATS = compiled(floats, "_multiply", vars(int8_gemm))

def built(kernel, kind, config, kept):
    tile = lambda dtype, sides: f"tensordesc<{dtype}[{sides[0]},{sides[1]}]>"
    types = {
        "a": tile(kind, (config.block_m, config.block_k)), "b": tile(kind, (config.block_n, config.block_k)),
        "out": tile("bf16", (config.block_m, config.block_n // config.parts)),
        "scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32", "rows": "i32", "columns": "i32", "inner": "i32",
    }
    constants = dict(
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PARTS=config.parts, TMA=True,
        OUT=int8_gemm.tl.bfloat16, GROUP=8, FLATTEN=config.flatten, PROGRAMS=132, IN_FLIGHT=kept,
    )
    source = ASTSource(
        fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(3, 8)},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=dict(
        num_warps=config.warps, num_stages=config.stages,
    ))

def loop(text):
    # From the loop over K to the wait behind it, without locations, types and what values are called.
    lines = re.sub(r" loc\\(.*\\)$|, maxNumImpreciseAcc = \\d+ : i32", "", text, flags=re.M).split("\\n")
    waits = [at for at, line in enumerate(lines) if "warp_group_dot_wait" in line]
    begin = max(at for at in range(waits[0]) if "= scf.for" in lines[at])
    found = "\\n".join(lines[begin : waits[1] + 1])
    names = {}
    found = re.sub(r"%[\\w\\-]+(?!_i32)\\b", lambda name: names.setdefault(name[0], f"%{len(names)}"), found)
    return re.sub(r"xs?i8|xf8E4M3FN", "x8", found).replace("xi32", "xf32")

found = []
for config in int8_gemm.CONFIGS:
    with in_flight.products_in_flight() as kept:
        ours = built(int8_gemm._multiply, "i8", config, kept).asm
    theirs = built(FLOATS, "fp8e4nv", config, False).asm["ttgir"]
    waits = re.findall(r"wgmma.wait_group\\S* (\\d)", ours["ptx"])
    alike = not config.flatten and loop(ours["ttgir"]) == loop(theirs)
    found.append((config.flatten, kept, sorted(set(waits)), alike))
print(json.dumps(found))
"""

LAUNCHED = """
import json, re
from loka.kernels.gemm.triton import int8_gemm
from loka.kernels.triton import in_flight

kernel, compiled = int8_gemm._multiply, []
run, runtime = kernel.run, triton.knobs.runtime
kernel.run = lambda *args, **options: compiled.append(run(*args, **{**options, "warmup": True}))
int8_gemm.multiprocessors = lambda device: 132

def launch(hook=None):
    runtime.add_stages_inspection_hook = hook
    a, b, out = (torch.empty(shape, dtype=torch.int8) for shape in ((2048, 512), (1024, 512), (2048, 1024)))
    int8_gemm._launch(a, b, out.bfloat16(), torch.ones(2048), torch.ones(1024), 512, int8_gemm.SQUARE)
    assert runtime.add_stages_inspection_hook is hook
    return sorted(set(re.findall(r"wgmma.wait_group\\S* (\\d)", compiled[-1].asm["ptx"])))

theirs = lambda backend=None, stages=None, *others: ("theirs", "3") if stages is None else None
found = [launch(), launch(theirs), launch()]
in_flight._VERSION = "another"
print(json.dumps([*found, launch(), len({each.hash for each in compiled})]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver of its own compiles for sm_90 here")
def test_products_of_integers_are_in_flight_as_triton_has_it_for_floats():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", DRIVER + IN_FLIGHT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    in_one_pipeline = [each for each in found if each[0]]  # whose loop has the epilogue in it, and waits
    assert [waits for _, _, waits, _ in in_one_pipeline] == [["0"]]
    others = [each for each in found if not each[0]]
    assert len(others) == 3
    assert all(kept and waits == ["0", "1"] and alike for _, kept, waits, alike in others), others


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver of its own compiles for sm_90 here")
def test_an_int8_gemm_that_is_launched_has_products_in_flight(tmp_path):
    """Not where somebody else changes what is compiled. What is compiled otherwise is another kernel on disk."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", DRIVER + LAUNCHED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["0", "1"], ["0"], ["0", "1"], ["0", "1"], 3]
