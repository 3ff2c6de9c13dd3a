"""torch.compile of a module in place, whatever its class, and repairs of what torch and Triton compile wrong.

`module.compile()` does nothing for an nn.Sequential: Dynamo skips the frames of torch.nn itself, unless a frame that it
compiles calls them, and then compiles the other classes that it finds inside one by one (torch 2.11 and 2.13). A
baseline made so runs linear layers and activations eagerly, and no norm is fused with what follows it.

Dynamo keeps and counts compiled programs by code object. From the ninth program of a frame on, it runs the frame as it
is written. So each module gets a frame of its own here, or shares one with modules that are given the same frame:
repeated blocks compile once.
"""

import functools
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from loka.core.assembler import keep_constants

Module = TypeVar("Module", bound=nn.Module)


_numbers = itertools.count()
_before: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""How modules that are compiled here were called before: None, or as their owners had compiled them. Not on the
modules, which are copied."""
_collector = threading.RLock()


def traced_here() -> bool:
    """Whether a compiler traces this very call. `torch.compiler.is_compiling` speaks for the whole process: it is true
    in all threads while one of them compiles or exports.
    """
    if torch.compiler.is_dynamo_compiling():  # a constant where Dynamo traces, and false elsewhere
        return True
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def compile_in_place(module: Module, frame: CodeType | None = None, *, replayed: bool = False) -> Module:
    """The same module, whose calls now run compiled for the shapes that they see; `forward` and hooks stay its own.

    Args:
        frame: from `new_frame`, for modules that may share what is compiled; by default the module gets its own.
        replayed: compiled code runs as torch's own CUDA graphs (CUDA graph trees). These keep the memory of everything
            that they return: call `torch.compiler.cudagraph_mark_step_begin()` where nobody needs earlier results any
            more.
    """
    return _called_by(module, _compiled_alone(_own_call(module, frame), replayed=replayed))


def compile_forward(module: Module, *, replayed: bool) -> Module:
    """As `compile_in_place`, but only for the forward of the module: its hooks run as they are written, around the
    compiled code.
    """
    written = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return written(*args, **kwargs)

    mend_compilers()
    frame = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    compiled = _compiled_alone(FunctionType(frame, forward.__globals__, closure=forward.__closure__), replayed=replayed)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = vars(module).get("forward")
        vars(module)["forward"] = compiled
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own

    return _called_by(module, call)


def _compiled_alone(function: FunctionType, *, replayed: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, options={"triton.cudagraphs": True} if replayed else None)


def _called_by(module: Module, call: Callable[..., Any]) -> Module:
    _before.setdefault(module, module._compiled_call_impl)
    module._compiled_call_impl = call
    return module


def allow_programs(count: int) -> None:
    """Dynamo compiles a frame for that many modules and inputs, and no fewer than before, until it gives up on it.

    By default it gives up from the ninth on, which then runs as it is written. Blocks of one class that are compiled
    one by one have a program each where their sites are planned.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * count)


def compiled_call(module: nn.Module) -> Callable[..., Any]:
    """A function that calls the module, compiled for the shapes it sees. Calls of the module itself run as they are
    written.
    """
    return _compiled_alone(_own_call(module, None), replayed=False)


@contextmanager
def few_collections() -> Iterator[None]:
    """Inside, Python's garbage collector leaves old objects alone, which took 0.7 s of a load. Only one thread at a
    time may be inside, since the thresholds are those of the process.
    """
    with _collector:
        before = gc.get_threshold()
        gc.set_threshold(*before[:2], 1000)
        try:
            yield
        finally:
            gc.set_threshold(*before)


def hash_of_triton() -> Callable[[], object]:
    """Computes the hash that Triton's caches ask for first: 0.4 s, in which other threads run. Without Triton it does
    nothing.
    """
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return lambda: None
    return triton_key


def mend_compilers() -> None:
    """From here on, what torch and Triton would compile wrong without an error is compiled right, or refused, and what
    they would take minutes for is compiled in seconds."""
    keep_constants()
    _order_read_backs()
    _describe_ops_when_asked()


def _describe_ops_when_asked() -> None:
    """Inductor writes down the arguments of an op that it meets for the first time only for who reads that.

    torch 2.11 does for each op that has no lowering, for a log that is off. The text of an op's result holds that of
    all its inputs, many times over, so it grows eightfold with each block before it: a stack of six gated blocks was
    not compiled within 143 s (H200, docs/log.md). torch 2.13 asks for the text lazily, as this does, and then gets it.
    """
    from torch._inductor.exc import OperatorIssue
    from torch._logging import LazyString

    issue: Any = OperatorIssue
    described = issue.operator_str
    if not hasattr(described, _WHEN_ASKED):

        def operator_str(target: Any, args: Any, kwargs: Any) -> str | LazyString[Any]:
            if sys._getframe(1).f_code is LazyString.__str__.__code__:  # which may return nothing but text
                return described(target, args, kwargs)
            return LazyString(described, target, args, kwargs)

        setattr(operator_str, _WHEN_ASKED, True)
        issue.operator_str = staticmethod(operator_str)


_WHEN_ASKED = "loka_when_asked"


def _order_read_backs() -> None:
    """Inductor's Triton kernels wait, all threads of a block, before they read back what they stored.

    A reduction's loop may read what a loop before it stored, in another layout, so that a thread reads what
    another has yet to write: outputs differ from run to run, without a word (Kunlun in bf16 by 40 to 60 %, on an
    H200, 2.5 % since; docs/log.md). torch 2.13 and before do not wait; pytorch#190519 adds the barrier.

    Kernels of before lie in caches, whose keys hold the names of functions that are marked as cacheable: one that
    nobody calls sets them apart. The keys' tag would be in the names of the autotuner's picks too, for this process,
    which reads them, and not for its workers, which name what is written: each process would time all launches
    anew, and sums differ by what won.
    """
    try:
        from torch._inductor import config
        from torch._inductor.codegen.triton import TritonKernel  # here, so that `import loka` loads no compiler
    except ImportError:  # without Triton
        return
    kernels: Any = TritonKernel
    if not hasattr(kernels.load, _WAITS):
        kernels.load = _behind_barriers(kernels.load)
    marked = config.unsafe_marked_cacheable_functions
    if _WAITS not in marked:
        config.unsafe_marked_cacheable_functions = {**marked, _WAITS: "loka"}


_WAITS = "loka_read_backs_wait_constants_kept"


def _behind_barriers(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def found(kernel: Any, name: str, index: Any) -> Any:
        """What a kernel stored and still knows is not loaded: what comes here is read back."""
        if name not in kernel.store_buffer_names and name not in kernel.cse.invalidated_stores:
            return load(kernel, name, index)
        place = kernel.get_load_buffer

        def behind_a_barrier(indexing: Any) -> Any:
            lines = place(indexing)
            lines.writeline("tl.debug_barrier()")
            return lines

        kernel.get_load_buffer = behind_a_barrier
        try:
            return load(kernel, name, index)
        finally:
            del kernel.get_load_buffer

    setattr(found, _WAITS, True)
    return found


def new_frame() -> CodeType:
    """A new code object for calls of a module, of which Dynamo knows nothing yet."""
    return _call_of(nn.Identity()).__code__.replace(co_name=f"call_{next(_numbers)}")


def runs_compiled(module: nn.Module) -> bool:
    """Whether the module runs compiled by `compile_in_place` or `compile_forward`."""
    return module in _before


def run_as_written(module: Module) -> Module:
    """Undoes `compile_in_place` and `compile_forward`. A module that its owner had compiled is then compiled in the
    owner's way again.
    """
    module._compiled_call_impl = _before.pop(module, None)
    return module


def _own_call(module: nn.Module, frame: CodeType | None) -> FunctionType:
    call = _call_of(module)
    mend_compilers()
    return FunctionType(frame or new_frame(), call.__globals__, closure=call.__closure__)


def _call_of(module: nn.Module) -> FunctionType:
    """A frame that belongs to this file, which Dynamo does not skip."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    assert isinstance(call, FunctionType)
    return call
