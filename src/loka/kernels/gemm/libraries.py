"""The libraries that bring kernels: how to get each, and whether it works here.

Nothing is imported before it is asked for, and nothing is raised: a library that is absent or
broken gives a reason. Versions are those seen to link and to agree with the reference on an H200
with torch 2.11.0 and CUDA 13.0; docs/kernels.md says more.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from loka.core.exceptions import first_line


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of kernels. Its distribution is in `core.device.LIBRARIES` under the same name.

    Attributes:
        name: as in `Kernel.library`.
        module: the top-level module to look for.
        load: imports what the adapter calls and touches it; raises what is wrong.
        install: how to get it.
        known: versions that are known to work, or what is known instead.
        hint: what is usually wrong when it does not load.
    """

    name: str
    module: str
    load: Callable[[], object]
    install: str
    known: str
    hint: str = ""


def _torchao() -> object:
    importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    return importlib.import_module("torchao.float8.float8_ops").addmm_float8_unwrapped


def _fbgemm() -> object:
    importlib.import_module("fbgemm_gpu.experimental.gen_ai")  # loads the shared object with the ops
    return torch.ops.fbgemm.f8f8bf16_rowwise


def _deep_gemm() -> object:
    return importlib.import_module("deep_gemm").fp8_gemm_nt


ADAPTED: dict[str, Library] = {
    library.name: library
    for library in (
        Library(name="torchao", module="torchao", load=_torchao, install="pip install 'loka[torchao]'", known="0.18.0"),
        Library(
            name="fbgemm",
            module="fbgemm_gpu",
            load=_fbgemm,
            install="pip install 'loka[fbgemm]'",
            known="1.6.0 (1.9.0 does not link with torch 2.11)",
            hint="each release is built for one torch; 1.6.0 is for 2.11",
        ),
        Library(
            name="deep_gemm",
            module="deep_gemm",
            load=_deep_gemm,
            install="pip install 'loka[deep-gemm]'",
            known="0.1.4.post1 (0.1.5.post3 and newer do not link with torch 2.11)",
            hint="0.1.4.post1 is for torch 2.11; CUDA_HOME must lead to nvcc, which compiles its kernels",
        ),
    )
}

WITHOUT_ADAPTER: dict[str, str] = {
    "transformer_engine": "its PyTorch half comes as source only and its GEMM needs its own tensor classes",
    "mslk": "FBGEMM GenAI moved there; its wheels come with PyTorch's own index, and we never ran one",
    "hipblaslt": "AMD GPUs: nothing of LoKA was run on one",
    "aiter": "AMD GPUs: nothing of LoKA was run on one",
}


def no_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"


@functools.cache
def why_missing(library: str) -> str | None:
    """Why `library` cannot be used on this machine, or None. Imports it, once."""
    entry = ADAPTED[library]
    if entry.module not in sys.modules and importlib.util.find_spec(entry.module) is None:
        return f"not installed ({entry.install})"
    try:
        with _quiet():
            entry.load()
    except Exception as error:
        hint = f" ({entry.hint})" if entry.hint else ""
        return f"installed, but does not load: {first_line(error)}{hint}"
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Libraries complain into the root logger about parts LoKA does not use, and configure it."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(silent)
