"""Which loops keep a product of integers in flight, and that the hook is there only meanwhile."""

import importlib.util
import linecache
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import with_triton  # noqa: F401

from loka.kernels.triton import in_flight as flying

LOOP = """\
#mma = #ttg.nvidia_mma<{versionMajor = 3}>
module {
  tt.func public @_multiply(%a: i32) {
    scf.for %tile = %c0_i32 to %tiles step %c132_i32  : i32 {
      %sum:4 = scf.for %k = %c0_i32 to %inner step %c1_i32 iter_args(%acc = %cst, %last = %c1_i32, %read = %c-1_i32, \
%phase = %c0_i32) -> (tensor<64x64xi32, #mma>, i32, i32, i32)  : i32 {
        %left = ttg.memdesc_index %a[%read] : !ttg.memdesc<3x64x128xi8, #shared> -> !ttg.memdesc<64x128xi8, #shared>
        %right = ttg.memdesc_index %b[%read] : !ttg.memdesc<3x64x128xi8, #shared> -> !ttg.memdesc<64x128xi8, #shared>
        %dot = ttng.warp_group_dot %left, %right, %acc {isAsync = true} : !ttg.memdesc<64x128xi8> -> tensor<64x64xi32, #mma>
        %done:3 = ttng.warp_group_dot_wait %dot, %left, %right {pendings = 0 : i32} : tensor<64x64xi32, #mma>, !ttg.memdesc<64x128xi8>
        %next = arith.addi %last, %c1_i32 : i32
        scf.yield %done#0, %next, %read, %phase : tensor<64x64xi32, #mma>, i32, i32, i32
      } {tt.num_stages = 3 : i32}
      %numbers = arith.sitofp %sum#0 : tensor<64x64xi32, #mma> to tensor<64x64xf32, #mma>
      %other = arith.addi %sum#1, %c1_i32 : i32
    }
    tt.return
  }
}
"""  # noqa: E501


def test_the_wait_moves_behind_the_loop():
    found = flying.in_flight(LOOP).split("\n")
    before = LOOP.split("\n")
    (added,) = [at for at, line in enumerate(found) if "%loka_done = " in line]
    assert before[added - 1] == found[added - 1] == "      } {tt.num_stages = 3 : i32}"
    wait = "%loka_done = ttng.warp_group_dot_wait %sum#0 {pendings = 0 : i32} : tensor<64x64xi32, #mma>"
    assert found.pop(added) == f"      {wait}"
    changed = [(one, other) for one, other in zip(before, found, strict=True) if one != other]
    assert [(one.replace("pendings = 0", "pendings = 1"), other) for one, other in changed[:1]] == [
        (changed[0][1], changed[0][1])
    ]
    assert changed[1:] == [(changed[1][0], changed[1][0].replace("%sum#0", "%loka_done"))]


@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("memdesc<3x", "memdesc<2x"),  # the load of a later step would go to the buffer that is read
        ("memdesc<3x", "memdesc<4x"),
        ("%b[%read] : !ttg.memdesc<3x", "%b[%read] : !ttg.memdesc<4x"),
        ("%last = %c1_i32", "%last = %c2_i32"),
        ("%read = %c-1_i32", "%read = %c0_i32"),
        ("%phase = %c0_i32", "%phase = %c1_i32"),  # which of both counts buffers?
        ("%phase = %c0_i32", "%phase = %c-1_i32"),
        ("arith.addi %last", "arith.addi %done#0"),  # something in the loop reads the sum
        ("%done#0, %next, %read", "%next, %next, %read"),
        ("%done#0, %next, %read", "%done#0, %done#0, %read"),
        ("scf.yield %done#0, %next", "scf.condition(%odd) %next, %done#0"),
        ("pendings = 0", "pendings = 1"),
        ("i32, #mma", "f32, #mma"),
        ("iter_args(", "iter_arguments("),
    ],
)
def test_other_loops_stay(what, by):
    assert what in LOOP
    assert flying.in_flight(LOOP.replace(what, by)) is None


def test_names_are_read_to_their_end():
    """A result from the tenth on begins as another, and so may a value."""
    text = LOOP.replace("%done#0, %next", "%next, %done#0").replace("%sum#1,", "%sum#10,").replace("%sum#0", "%sum#1")
    text = text.replace("arith.addi %last, %c1_i32", "arith.addi %last, %done2")
    found = flying.in_flight(text)
    assert "= ttng.warp_group_dot_wait %sum#1 {pendings = 0 : i32}" in found
    assert "arith.sitofp %loka_done" in found
    assert "arith.addi %sum#10," in found


def test_a_wait_under_a_condition_stays():
    """Behind a loop of the same depth, which is none around it."""
    (begin,) = [line for line in LOOP.split("\n") if "%k = " in line]
    ended = ["        scf.yield %acc, %last, %read, %phase : i32", "      }", "      %some:4 = scf.if %odd -> (i32) {"]
    assert flying.in_flight(LOOP.replace(begin, "\n".join([begin, *ended]))) is None


def test_of_several_loops_none_is_changed():
    assert flying.in_flight(LOOP + LOOP) is None
    assert flying.in_flight("") is None
    assert flying.in_flight(LOOP.split("        scf.yield")[0]) is None  # nothing ends


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(flying, "INTERPRETED", False)
    return flying.triton.knobs.runtime


def stages_of(hook):
    """Whether the hook changes what is compiled."""
    stage = mock.Mock()
    stages = {"ttgir": stage}
    hook(None, stages, None, None, 90)
    return stages["ttgir"] is not stage


def test_the_hook_is_there_meanwhile(runtime):
    assert runtime.add_stages_inspection_hook is None
    with flying.products_in_flight() as how:
        assert how == flying.how_in_flight() != ""
        key, digest = runtime.add_stages_inspection_hook()
        assert key == ""  # what other threads compile keeps its name in the cache
        assert digest
        assert stages_of(runtime.add_stages_inspection_hook)
        with flying.products_in_flight() as inner:
            assert inner == how
        assert stages_of(runtime.add_stages_inspection_hook)
    with pytest.raises(ValueError, match="of the kernel"), flying.products_in_flight():
        raise ValueError("of the kernel")
    assert runtime.add_stages_inspection_hook is None
    assert not stages_of(flying._stages)


def test_a_kernel_has_the_hook_while_it_is_compiled(runtime):
    kernel = mock.Mock(spec=["_do_compile"])
    kernel._do_compile = lambda *args, **options: (runtime.add_stages_inspection_hook, args, options)
    assert flying.kept_in_flight(kernel) is kernel
    hook, args, options = kernel._do_compile(1, two=2)
    assert stages_of(hook) is False  # behind it
    assert (hook, args, options) == (flying._stages, (1,), {"two": 2})
    assert runtime.add_stages_inspection_hook is None
    interpreted = mock.Mock(spec=[])
    assert flying.kept_in_flight(interpreted) is interpreted


def test_of_threads_one_compiles_so_at_a_time(runtime):
    found, inside, let = [], threading.Event(), threading.Event()

    def first():
        with flying.products_in_flight() as how:
            inside.set()
            assert let.wait(10)
            found.append((how, stages_of(runtime.add_stages_inspection_hook)))

    def second():
        found.append((flying.how_in_flight(), stages_of(runtime.add_stages_inspection_hook)))
        let.set()
        with flying.products_in_flight() as how:
            found.append((how, stages_of(runtime.add_stages_inspection_hook)))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    how = flying.how_in_flight()
    assert found == [(how, False), (how, True), (how, True)]  # what others compile meanwhile is as ever
    assert runtime.add_stages_inspection_hook is None


def test_a_change_of_the_module_makes_another_kernel(runtime, monkeypatch, tmp_path):
    """Or kernels of before would be found in Triton's cache on disk."""
    found = []
    for more in ("", "\n# changed"):
        path = tmp_path / "changed.py"
        path.write_text(Path(flying.__file__).read_text() + more)
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location("changed", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "changed", module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "INTERPRETED", False)
        found.append(module.how_in_flight())
    assert found[0] == flying.how_in_flight() != found[1] != ""


def test_somebody_elses_hook_stays(runtime, monkeypatch):
    theirs = mock.Mock()
    with flying.products_in_flight():
        monkeypatch.setattr(runtime, "add_stages_inspection_hook", theirs)
    assert runtime.add_stages_inspection_hook is theirs
    with flying.products_in_flight() as how:
        assert how == ""
    assert runtime.add_stages_inspection_hook is theirs
    monkeypatch.setattr(runtime, "add_stages_inspection_hook", None)


def test_without_a_hook_or_in_the_interpreter_nothing_happens(runtime, monkeypatch):
    monkeypatch.setattr(flying, "INTERPRETED", True)
    with flying.products_in_flight() as how:
        assert how == ""
    monkeypatch.setattr(flying, "INTERPRETED", False)
    monkeypatch.setattr(flying, "triton", mock.Mock(spec=[]))
    with flying.products_in_flight() as how:
        assert how == ""


def test_a_module_that_triton_does_not_read_stays(runtime):
    module = mock.Mock()
    stages = {"ttgir": lambda source, metadata: module}
    with flying.products_in_flight():
        runtime.add_stages_inspection_hook(None, stages, None, None, 90)
    for module.str_nodebug.return_value in (LOOP.replace("scf.for %tile", "scf.four %tile"), ""):
        with mock.patch.object(flying, "_parsed", side_effect=RuntimeError("Parse MLIR file failed.")) as parsed:
            assert stages["ttgir"](None, {}) is module
        assert parsed.called == bool(module.str_nodebug.return_value)
    del module.str_nodebug
    assert stages["ttgir"](None, {}) is module
