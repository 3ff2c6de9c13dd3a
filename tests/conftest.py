"""Fixtures for all tests. Triton kernels run in its interpreter where there is no GPU."""

import atexit
import contextlib
import gc
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # tests/models.py, tests/ranks.py

# How long an example takes says what else the machine does.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")


def _without_repeated_work():
    """Two thirds of what a kernel takes in triton's interpreter (3.9), for nothing that a test sees.

    It replaces all functions of its language at each call of a device function, though the launch has;
    and it computes all integers again in 64 bits, which finds no overflow in shapes as small as here.
    """
    from triton.runtime import interpreter

    language, builder = interpreter.tl, interpreter.interpreter_builder
    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope

    def once(function):
        visible = [module for module in (language, language.core) if module in function.__globals__.values()]
        patched = visible and not any(language.core.is_builtin(module.load) for module in visible)
        return nothing_to_restore() if patched else patch(function)

    interpreter._patch_lang = once
    builder.options = replace(builder.options, sanitize_overflow=False)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
    with contextlib.suppress(ImportError, AttributeError):  # no triton, or one with another interpreter
        _without_repeated_work()

# In every new cache Inductor compiles a file to see whether the machine has the instructions that it names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# What is imported and collected stays to the end: collections of garbage look through it for 0.2 s each.
gc.disable()
atexit.register(gc.unfreeze)  # or torch's and triton's libraries would report leaks


def pytest_configure(config):
    import forked

    if hasattr(config, "workerinput"):
        forked.join()
    elif config.getoption("numprocesses", 0) and not config.option.collectonly:
        forked.share()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def overflow_is_an_error(monkeypatch):
    """In the interpreter, for a test whose integers need more than 32 bits."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))


def pytest_collection_modifyitems(items):
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    skip = pytest.mark.skip(reason="needs a CUDA GPU of capability 9.0 or newer")
    for item in items:
        if "gpu" in item.keywords and not capable:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def without_inductor(monkeypatch):
    """torch.compile traces and differentiates, and writes no code: for tests of what is traced."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, **options: compiled(call, **{**options, "backend": "aot_eager", "options": None})
    )
