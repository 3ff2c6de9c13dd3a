"""Works around ptxas of CUDA 12.8 to 13.0, which drops constants, so that Triton kernels are wrong without an error.

In a packed addition, which is two 16-bit sums, ptxas adds zero where the program reads only one of them (triton#11581).
LLVM packs small indices in this way: a compiled InterFormer attended to events that its rows do not have (docs/log.md).
No GPU is needed to see it: two programs that differ in a constant become the same code.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from loka.core.exceptions import WrongResults

_TOOLS = {"ptxas": "sm_90", "ptxas_blackwell": "sm_100"}
_PROGRAM = """.version 8.7
.target {target}
.address_size 64
.visible .entry kernel(.param .u64 out) {{
 .reg .b16 %h<3>; .reg .b32 %r<5>; .reg .b64 %d<2>;
 ld.param.u64 %d1, [out];
 mov.u32 %r1, %tid.x;
 mov.b32 %r2, {constant};
 add.s16x2 %r3, %r1, %r2;
 mov.b32 {{%h1, %h2}}, %r3;
 st.global.u16 [%d1], %h1;
 ret;
}}
"""


def keep_constants() -> None:
    """Where ptxas drops constants, Triton assembles through ptxas.sh from here on, which splits packed additions.

    The environment tells Inductor's workers, and processes that this one starts, to do the same.

    Raises:
        WrongResults: the script cannot run, or constants are dropped nevertheless.
    """
    if torch.version.cuda and torch.cuda.is_available():
        for tool in _TOOLS:
            _keep(tool)


def _keep(tool: str) -> None:
    try:
        from triton import knobs
        from triton.backends.nvidia import compiler
    except ImportError:  # without Triton
        return
    found, target = getattr(knobs.nvidia, tool).path, _TOOLS[tool]
    if keeps_constants(found, target) is not False:
        return
    script, variable = str(Path(__file__).with_name(f"{tool}.sh")), f"TRITON_{tool.upper()}_PATH"
    try:
        kept = keeps_constants(script, target, found)
        why = {None: "assembles nothing", False: "drops them too"}.get(kept)
    except OSError as error:
        why = str(error)
    if why:
        raise WrongResults(
            f"{found} drops constants of packed additions (triton#11581): kernels of Triton are wrong by it",
            why=[f"{script}, which would split them: {why}"],
            way_out=f"set {variable}, or triton.knobs.nvidia.{tool} where it is set, to a ptxas of CUDA 13.3 or newer",
        )
    os.environ |= {variable: script, f"LOKA_{tool.upper()}": found}
    if getattr(knobs.nvidia, tool).path != script:  # set in Python, which goes before the environment
        setattr(knobs.nvidia, tool, script)
    compiler.get_ptxas_version.cache_clear()  # by which Triton's caches go
    workers = sys.modules.get("torch._inductor.async_compile")
    if workers is not None:
        workers.shutdown_compile_workers()  # they have the environment of before


@functools.cache
def keeps_constants(ptxas: str, target: str, behind: str = "") -> bool | None:
    """Whether the code of a sum of which one half is read depends on what is added; None where nothing is assembled.

    Args:
        ptxas: path of an assembler, or of the script beside this file that runs one.
        target: a GPU, as `sm_90`.
        behind: the assembler that the script runs; where it is "", the environment names it.

    Raises OSError where `ptxas` cannot be run.
    """
    environment = {**os.environ, **({f"LOKA_{tool.upper()}": behind for tool in _TOOLS} if behind else {})}
    with tempfile.TemporaryDirectory() as folder:
        running = []  # side by side: a process takes as long to begin as to assemble
        for constant in (1, 2):
            text, code = Path(folder) / f"{constant}.ptx", Path(folder) / f"{constant}.cubin"
            text.write_text(_PROGRAM.format(target=target, constant=constant))
            command = [ptxas, f"--gpu-name={target}", str(text), "-o", str(code)]
            quiet = subprocess.DEVNULL
            running.append((subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet), code))
        failed = [process.wait() for process, _ in running]
        if any(failed):
            return None
        first, second = (code.read_bytes() for _, code in running)
    return first != second
