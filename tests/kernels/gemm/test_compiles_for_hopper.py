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
