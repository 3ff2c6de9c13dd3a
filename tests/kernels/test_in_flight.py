"""Which loops keep a product of integers in flight, and that the hook is there only meanwhile."""

import threading
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
        ("%last = %c1_i32", "%last = %c2_i32"),
        ("%read = %c-1_i32", "%read = %c0_i32"),
        ("arith.addi %last", "arith.addi %done#0"),  # something in the loop reads the sum
        ("%done#0, %next, %read", "%next, %next, %read"),
        ("scf.yield", "scf.condition"),
        ("pendings = 0", "pendings = 1"),
        ("i32, #mma", "f32, #mma"),
        ("iter_args(", "iter_arguments("),
    ],
)
def test_other_loops_stay(what, by):
    assert what in LOOP
    assert flying.in_flight(LOOP.replace(what, by)) is None


def test_a_wait_under_a_condition_stays():
    """Behind a loop of the same depth, which is none around it."""
    (begin,) = [line for line in LOOP.split("\n") if "%k = " in line]
    ended = ["        scf.yield %acc, %last, %read, %phase : i32", "      }", "      %some:4 = scf.if %odd -> (i32) {"]
    assert flying.in_flight(LOOP.replace(begin, "\n".join([begin, *ended]))) is None


def test_of_several_loops_none_is_changed():
    assert flying.in_flight(LOOP + LOOP) is None
    assert flying.in_flight("") is None


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(flying, "INTERPRETED", False)
    return flying.triton.knobs.runtime


def test_the_hook_is_there_meanwhile(runtime):
    assert runtime.add_stages_inspection_hook is None
    with flying.products_in_flight() as whether:
        assert whether
        key, digest = runtime.add_stages_inspection_hook()
        assert key
        assert digest
    with pytest.raises(ValueError, match="of the kernel"), flying.products_in_flight():
        raise ValueError("of the kernel")
    assert runtime.add_stages_inspection_hook is None


def test_of_threads_one_compiles_so_at_a_time(runtime):
    found, inside, let = [], threading.Event(), threading.Event()

    def first():
        with flying.products_in_flight() as whether:
            inside.set()
            assert let.wait(10)
            found.append(whether)

    def second():
        with flying.products_in_flight() as whether:
            found.append(whether)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    let.set()
    for thread in threads:
        thread.join(10)
    assert found == [True, True]
    assert runtime.add_stages_inspection_hook is None


def test_somebody_elses_hook_stays(runtime, monkeypatch):
    theirs = mock.Mock()
    monkeypatch.setattr(runtime, "add_stages_inspection_hook", theirs)
    with flying.products_in_flight() as whether:
        assert not whether
    assert runtime.add_stages_inspection_hook is theirs


def test_without_a_hook_or_in_the_interpreter_nothing_happens(runtime, monkeypatch):
    monkeypatch.setattr(flying, "INTERPRETED", True)
    with flying.products_in_flight() as whether:
        assert not whether
    monkeypatch.setattr(flying, "INTERPRETED", False)
    monkeypatch.setattr(flying, "triton", mock.Mock(spec=[]))
    with flying.products_in_flight() as whether:
        assert not whether
