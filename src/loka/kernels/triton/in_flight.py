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
more than loads are ahead, or the text stays as it is. On an H200 an INT8 GEMM takes 0.84 to 1.0 of the time.
"""

import contextlib
import re
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
_KEY = "loka_in_flight", "1"  # as Triton names what it compiled by a hook
_lock = threading.RLock()


@contextlib.contextmanager
def products_in_flight() -> Iterator[bool]:
    """Inside, Triton compiles loops so. Yields whether it does: not in its interpreter, without such a hook, or where
    somebody else has set one. A kernel takes the answer as a constant, because Triton 3.6 caches kernels without a
    look at the hook.
    """
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    with _lock:
        if INTERPRETED or getattr(runtime, _HOOK, _stages) is not None:
            yield False
            return
        setattr(runtime, _HOOK, _stages)
        try:
            yield True
        finally:
            setattr(runtime, _HOOK, None)


_HOOK = "add_stages_inspection_hook"


def _stages(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """The hook: without arguments its name for Triton's caches; else it puts itself behind a stage."""
    if stages is None:
        return _KEY
    before = stages["ttgir"]

    def changed(source: Any, metadata: Any) -> Any:
        module = before(source, metadata)
        text = in_flight(module.str_nodebug())
        return module if text is None else _parsed(text, module)

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
    found = [at for at, line in enumerate(lines) if _WAIT.match(line)]
    if len(found) != 1:
        return None
    at = found[0]
    waited = _WAIT.match(lines[at])
    assert waited is not None
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
    if len([each for each in given if read.fullmatch(each)]) != 1:
        return None
    if any(read.search(line) for line in lines[at + 1 : end - 1]):  # something else reads the sum in the loop
        return None
    place = next(index for index, each in enumerate(given) if read.fullmatch(each))
    result = f"{loop[1]}#{place}" if len(given) > 1 else loop[1]
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
