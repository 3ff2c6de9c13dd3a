"""A product of integers stays in flight while the next one begins, as Triton has it for floats.

In a loop over K Triton (3.6, 3.9) lets one product of floats run on while it issues the next, and waits for each one of
integers. All else is alike: the same buffers, as many loads ahead. Where a loop is so, its text is changed between two
of Triton's own stages, by the hook that Triton has for that, to what it is for floats:

    for ...:                                       for ...:
        c = dot(a, b, c)                               c = dot(a, b, c)
        c = wait(c, pendings=0)          ->            c = wait(c, pendings=1)
        load(a, b of a later step)                     load(a, b of a later step)
                                                   c = wait(c, pendings=0)

The load goes to the buffer that the step before has read, whose product is done by then: there has to be one buffer
more than loads are ahead, or the text stays as it is. On an H200 an INT8 GEMM by the same tiles takes 0.85 to 1.0 of
the time.
"""

import contextlib
import hashlib
import inspect
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from loka.kernels.triton.pack import INTERPRETED

_WAIT = re.compile(
    r"( *)(%\S+?)(?::\d+)? = ttng\.warp_group_dot_wait %\S+, .*\{pendings = 0 : i32\} : (tensor<[^>]*xi32, #\w+>),"
)
_LOOP = re.compile(r" *(%[^\s:]+)(?::\d+)? = scf\.for .* iter_args\((.*?)\) -> \((.*)\)")
_BUFFERS = re.compile(r"!ttg\.memdesc<(\d+)x\d+x\d+xi8,")
_DONE = "%loka_done"
_HOOK = "add_stages_inspection_hook"
_VERSION = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:16]
_lock = threading.RLock()


class _Local(threading.local):
    compiles: bool = False


_local = _Local()


def kept_in_flight(kernel: Any) -> Any:
    """A kernel of `triton.jit` that is compiled with products in flight. It takes `how_in_flight()` as a constant.

    The hook is there while the kernel is compiled, not at each launch: Triton tells what it has loaded apart by the
    hook, and would load the kernels anew that other threads launch meanwhile, which a captured stream does not allow.
    """
    compiles = getattr(kernel, "_do_compile", None)
    if compiles is None:  # in the interpreter
        return kernel

    def compiled(*args: Any, **options: Any) -> Any:
        with products_in_flight():
            return compiles(*args, **options)

    kernel._do_compile = compiled
    return kernel


def how_in_flight() -> str:
    """For Triton's caches, which (3.6 to 3.9) know nothing of what the hook does: another text for each state of this
    module. It is empty where products are not kept: in the interpreter, without such a hook, or with somebody else's.
    """
    hook = getattr(_runtime(), _HOOK, how_in_flight)
    return _VERSION if not INTERPRETED and hook in (None, _stages) else ""


@contextlib.contextmanager
def products_in_flight() -> Iterator[str]:
    """Inside, what this thread compiles has products in flight; yields `how_in_flight()`, which kernels take as a
    constant.
    """
    with _lock:
        how = how_in_flight()
        if not how or _local.compiles:
            yield how
            return
        setattr(_runtime(), _HOOK, _stages)
        _local.compiles = True
        try:
            yield how
        finally:
            _local.compiles = False
            if getattr(_runtime(), _HOOK) is _stages:  # else somebody has set another one since
                setattr(_runtime(), _HOOK, None)


def _runtime() -> Any:
    return getattr(getattr(triton, "knobs", None), "runtime", None)


def _stages(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """The hook. Without arguments it says what Triton adds to the names of what it compiles: nothing, for kernels of
    other threads are as ever. Else it puts itself behind a stage.
    """
    if stages is None:
        return "", "0"
    if not _local.compiles:
        return None
    before = stages["ttgir"]

    def changed(source: Any, metadata: Any) -> Any:
        module = before(source, metadata)
        try:
            text = in_flight(module.str_nodebug())
            return module if text is None else _parsed(text, module)
        except (AttributeError, RuntimeError):  # of a Triton that reads no such text: the product takes longer
            return module

    stages["ttgir"] = changed
    return None


def _parsed(text: str, module: Any) -> Any:
    from triton._C.libtriton import ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(text)
        found = ir.parse_mlir_module(str(path), module.context)
    found.context = module.context
    return found


def in_flight(text: str) -> str | None:
    """The text of a module (TTGIR) with products of integers in flight, or None where no loop is such."""
    lines = text.split("\n")
    found = [(at, waited) for at, line in enumerate(lines) if (waited := _WAIT.match(line))]
    if len(found) != 1:
        return None
    at, waited = found[0]
    inner, value, kind = waited.groups()
    outer = inner[2:]
    begin = next((n for n in reversed(range(at)) if not lines[n].startswith(inner)), at)  # of what the wait lies in
    end = next((n for n in range(at, len(lines)) if lines[n].startswith(f"{outer}}}")), None)
    if end is None or not lines[end - 1].startswith(f"{inner}scf.yield "):
        return None
    loop = _LOOP.match(lines[begin])
    given = lines[end - 1].split(" : ")[0].removeprefix(f"{inner}scf.yield ").split(", ")
    read = re.compile(re.escape(value) + r"(?:#0)?(?![\w#])")
    if loop is None or not _one_buffer_is_free(lines[begin : end + 1], loop[2]):
        return None
    places = [index for index, each in enumerate(given) if read.fullmatch(each)]
    if len(places) != 1:
        return None
    if any(read.search(line) for line in lines[at + 1 : end - 1]):  # something else reads the sum in the loop
        return None
    result = f"{loop[1]}#{places[0]}"
    after = re.compile(re.escape(result) + r"(?![\w#])")
    lines[at] = lines[at].replace("{pendings = 0 : i32}", "{pendings = 1 : i32}")
    done = f"{outer}{_DONE} = ttng.warp_group_dot_wait {result} {{pendings = 0 : i32}} : {kind}"
    return "\n".join([*lines[: end + 1], done, *(after.sub(_DONE, line) for line in lines[end + 1 :])])


def _one_buffer_is_free(loop: list[str], carried: str) -> bool:
    """Whether the loads of a loop go to the buffer before the one that is read: of N buffers, the last that is loaded
    already is N - 2 where the last that was read is -1. Of two buffers, a 0 might be the phase of their barriers."""
    counts = {int(count) for line in loop for count in _BUFFERS.findall(line)}
    if len(counts) != 1 or (count := counts.pop()) < 3:
        return False
    starts = [each.split(" = ")[1] for each in carried.split(", ")]
    return starts.count("%c-1_i32") == 1 and starts.count(f"%c{count - 2}_i32") == 1
