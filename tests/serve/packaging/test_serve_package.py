import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from served import (
    BOTH,
    EXACT,
    GROUP,
    POW2,
    ROW,
    TENSOR,
    TORCH,
    Cross,
    Tower,
    calibration,
    cross_plan,
    frozen,
    plan_for,
    rows,
    skip_where_missing,
    tower,
)

from loka.core.exceptions import MissingLibrary, NotWritten, ServeRefused, WrongResults
from loka.core.storage.files import sha256_of_file, tensors_from_bytes, tensors_to_bytes
from loka.serve import Server, freeze
from loka.serve.packaging import aot
from loka.serve.packaging.aot import _typical, tried, unpackaged
from loka.serve.packaging.checksum import checksum_of, write_checksum
from loka.serve.packaging.exported import PackagedSite
from loka.serve.rows import leaves
from loka.serve.sites import frozen_sites


def found_leaves(found, request):
    return leaves(torch._inductor.aoti_load_package(str(found.path))(*request))


def served(candidate=ROW, **options):
    model = tower()
    return frozen(model, dict.fromkeys(BOTH, candidate), **options)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("candidate", [ROW, POW2, GROUP, TENSOR, TORCH])
def test_a_packaged_site_computes_what_a_frozen_one_does(candidate, autocast):
    skip_where_missing(candidate)
    server = served(candidate, autocast=autocast)
    for name, site in frozen_sites(server.current.module).items():
        x = torch.randn(5, 3, site.weight.sides[1])
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            assert torch.equal(PackagedSite(site)(x), site(x)), name


def test_the_checksum_of_a_package_lies_beside_its_link_too(tmp_path, monkeypatch):
    """Beside the link that of the package before stayed, which the new one does not have."""

    def compiled(folder, *_):
        made = folder / "model.pt2"
        made.write_bytes(b"today's")
        return made

    monkeypatch.setattr(aot, "_compiled", compiled)
    monkeypatch.setattr(aot, "checked", lambda *_: (EXACT, []))
    link, real = tmp_path / "ranker.pt2", tmp_path / "stored" / "0001.pt2"
    real.parent.mkdir()
    real.write_bytes(b"yesterday's")
    link.symlink_to(real)
    write_checksum(link, sha256_of_file(link))
    found = served().package(link, batch=(1, 300))
    assert link.is_symlink()
    assert real.read_bytes() == b"today's"
    for package in (link, real):
        assert checksum_of(package).read_text() == f"{found.sha256}  {package.name}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("candidate", "autocast"), [(TENSOR, torch.bfloat16), (TORCH, None)])
def test_a_package_runs_without_loka(candidate, autocast, tmp_path):
    skip_where_missing(candidate)
    server = served(candidate, autocast=autocast, shadow=0.5)
    server.refresh(tower(1).state_dict())
    found = server.package(tmp_path / "ranker.pt2", batch=(1, 300))
    assert found.path.exists()
    assert found.sizes == (1, 37, 300)
    # Sums in another order: the last bits of float32, and rarely an FP8 value; FP8 itself costs 5e-3.
    assert found.mean_abs < 1e-5
    model = torch._inductor.aoti_load_package(str(found.path))
    request = rows(50)
    expected = server.current.module
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        torch.testing.assert_close(model(*request), expected(*request), atol=1e-2, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranker.pt2", "ranker.pt2.sha256"]
    check_beside(found.path, found.sha256)
    server.refresh(tower(2).state_dict())
    new = server.package_weights(found.path, tmp_path / "second.pt")
    assert new.mean_abs < 1e-5
    check_beside(new.path, new.sha256)
    model.load_constants(torch.load(new.path, weights_only=True), check_full_update=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        torch.testing.assert_close(model(*request), server.current.module(*request), atol=1e-2, rtol=0)
    again = server.package(tmp_path / "second.pt2", batch=(1, 300))
    assert torch.equal(model(*request), found_leaves(again, request)[0])
    alien = dict.fromkeys(("alien." + name for name in torch.load(new.path, weights_only=True)), torch.zeros(3))
    with pytest.raises(RuntimeError, match="not found"):  # names that hold another layout
        model.load_constants(alien, check_full_update=True)


Heads = namedtuple("Heads", ["each", "sum"])


class Named(Cross):
    def forward(self, x):
        return Heads(**super().forward(x))


@pytest.mark.slow
def test_raw_parameters_and_several_outputs(tmp_path):
    """Of a named tuple, which torch writes into no file."""
    torch.manual_seed(0)
    model = Named().eval()
    server = freeze(model, cross_plan(Cross(), ROW), calibration=[torch.randn(64, 24)])
    found = server.package(tmp_path / "cross.pt2", batch=(64, 64))
    loaded = torch._inductor.aoti_load_package(str(found.path))
    x = torch.randn(64, 24)
    for one, two in zip(leaves(loaded(x)), leaves(server(x).output), strict=True):
        torch.testing.assert_close(one, two, atol=1e-2, rtol=0)


@pytest.mark.slow
def test_the_example_in_cpp(tmp_path):
    """It compares all that the package returns, and says what is no answer to the same rows."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    example = Path(__file__).parents[3] / "examples" / "serve_cpp"
    server = served()
    server.package(tmp_path / "ranker.pt2", batch=(1, 64))
    build = ["sh", str(example / "build.sh"), str(tmp_path / "score")]
    subprocess.run(build, check=True, timeout=900, env={**os.environ, "PYTHON": sys.executable})

    def scored(*held, inputs="2", more=()):
        torch.save(list(held), tmp_path / "rows.pt")
        command = [str(tmp_path / "score"), str(tmp_path / "ranker.pt2"), str(tmp_path / "rows.pt"), inputs, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout + done.stderr

    dense, ids = request = rows(64)
    answer = server(request).output
    status, told = scored(*request, answer)
    assert (status, told.startswith("64 rows, 1 outputs")) == (0, True), told
    one_row = answer.index_fill(0, torch.tensor([7]), float("nan"))
    assert scored(dense.index_fill(0, torch.tensor([7]), float("nan")), ids, one_row)[0] == 0
    for other, status, reason in (
        ([answer + 1], 1, "largest difference 1"),
        ([one_row], 1, "1 of 64 entries are finite in one of the two only"),
        ([answer * float("nan")], 1, "64 of 64 entries are finite in one"),
        ([answer, answer + 5], 1, "returns 1 outputs, ROWS holds 2"),
        ([answer[:1]], 1, "the server's float [1]"),
        ([answer > 0], 1, "the server's bool [64]"),
        ([answer.double()], 1, "the server's double [64]"),
        ([], 2, "no output"),
    ):
        found, told = scored(*request, *other)
        assert (found, reason in told) == (status, True), told
    assert scored(dense * float("nan"), ids, answer * float("nan"))[0] == 1
    assert scored(*request, answer, inputs="x")[0] == 2
    server.refresh(tower(1).state_dict())
    new = server(request).output
    given = ["1e-3", str(server.package_weights(tmp_path / "ranker.pt2", tmp_path / "weights.pt").path)]
    assert (scored(*request, new)[0], scored(*request, new, more=given)[0]) == (1, 0)
    torch.save({"alien": torch.zeros(3)}, tmp_path / "weights.pt")
    status, told = scored(*request, new, more=given)
    assert (status, "alien" in told) == (2, True), told


def test_what_cannot_go_into_a_package():
    model = tower()
    plan = plan_for(model, {"first": ROW, "second": "deep_gemm:blockwise_e4m3"})
    assert list(unpackaged(plan)) == ["second"]
    assert "C shim" in unpackaged(plan)["second"]
    server = served()
    for batch in ((0, 5), (5, 4)):
        with pytest.raises(ServeRefused, match="no range of rows"):
            server.package("x.pt2", batch=batch)
    other = Server(
        card=server.card,
        plan=plan,
        skeleton=server._skeleton,
        scales={},
        module=server.current.module,
        precise=None,
        shadow=0,
        graphs=False,
        written=None,
        device=server.device,
    )
    with pytest.raises(ServeRefused, match=r"(?s)second: deep_gemm.*target=.package"):
        other.package("x.pt2")


def test_it_is_tried_with_rows_that_it_is_for():
    assert tried((1, 300)) == (1, 37, 300)
    assert tried((1, 8192)) == (1, 37, 4096)
    assert tried((8192, 8192)) == (8192,)
    assert tried((5000, 6000)) == (5000, 5036)
    assert [_typical((1, most)) for most in (1, 2, 3, 4096)] == [1, 2, 3, 4095]


def empty_file(program, *, package_path, inductor_configs):
    Path(package_path).write_bytes(b"")


def test_a_crash_is_told(monkeypatch, tmp_path):
    """As where the compiler links another libstdc++ than torch: no word, and a signal."""
    died = subprocess.CompletedProcess([], -11, "", "")
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", empty_file)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    with pytest.raises(WrongResults, match=r"(?s)it ended with -11.*CXX"):
        served().package(tmp_path / "x.pt2", batch=(1, 2))  # fewer than a form checks with
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_package_that_never_answers_is_told(monkeypatch, tmp_path):
    def run(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", empty_file)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(WrongResults, match=r"(?s)not answer within 600 s.*given 1, 2 rows on cpu.*Way out"):
        served().package(tmp_path / "x.pt2", batch=(1, 2))
    assert not list(tmp_path.iterdir())


def test_a_path_that_no_file_can_have_is_told_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.export, "export", None)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x.pt2", Path("/proc/none/x.pt2")):
        with pytest.raises(NotWritten, match=rf"(?s)cannot write {path}.*there is no {path}.*Way out"):
            served().package(path)


def test_of_two_at_once_one_waits(monkeypatch, tmp_path):
    """torch.export and Inductor patch torch while they run, and refuse what they find patched."""
    running, most = [], []

    def alone(*_, **__):
        running.append(0)
        time.sleep(0.05)
        most.append(len(running))
        running.pop()

    def compiled(*_, **__):
        alone()
        raise RuntimeError("seen")

    monkeypatch.setattr(torch.export, "export", alone)
    monkeypatch.setattr(aot, "_read", lambda program: set())
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    server = served()
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(server.package, tmp_path / f"{place}.pt2") for place in range(3)]
    assert all("seen" in str(one.exception()) for one in made)
    assert most == [1] * 6


@pytest.mark.slow
def test_what_a_compiler_raises_is_told(monkeypatch, tmp_path):
    def compiled(*_, **__):
        raise RuntimeError("cuda.h: no such file")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    with pytest.raises(ServeRefused, match=r"(?s)does not compile this Tower.*cuda\.h.*CUDA_HOME"):
        served().package(tmp_path / "x.pt2")


def test_a_name_that_torch_does_not_load_is_refused(tmp_path):
    with pytest.raises(ServeRefused, match=r"(?s)ranker is no name of a package.*name it .*ranker\.pt2"):
        served().package(tmp_path / "ranker")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingLibrary, match=r"C\+\+ compiler"):
        served().package("x.pt2")


class Branches(Tower):
    def forward(self, dense, ids):
        return super().forward(dense, ids) if float(dense.sum()) < 1e9 else dense[:, 0]


@pytest.mark.slow
def test_a_model_that_does_not_export(tmp_path):
    torch.manual_seed(0)
    model = Branches().eval()
    server = frozen(model, BOTH)
    with pytest.raises(ServeRefused, match=r"torch.export does not take this Branches"):
        server.package(tmp_path / "x.pt2")
    assert not list(tmp_path.iterdir())


def check_beside(path, sha256):
    """What `sha256sum -c` reads; it notices another byte."""
    beside = path.with_name(path.name + ".sha256")
    assert beside.read_text() == f"{sha256}  {path.name}\n"
    if shutil.which("sha256sum") is None:
        return
    check = ["sha256sum", "-c", beside.name]
    assert subprocess.run(check, cwd=path.parent, capture_output=True).returncode == 0
    kept = path.read_bytes()
    path.write_bytes(kept + b"!")
    assert subprocess.run(check, cwd=path.parent, capture_output=True).returncode == 1
    path.write_bytes(kept)


@pytest.mark.slow
def test_inputs_of_another_form_are_refused_where_they_are_checked(tmp_path):
    """What docs/serve.md says of AOTI_RUNTIME_CHECK_INPUTS; torch reads it once, as a package is loaded."""
    server = served()
    ranges, single = (server.package(tmp_path / f"{most}.pt2", batch=(1, most)).path for most in (64, 1))
    code = f"""
import torch
dense, ids = torch.randn(8, 13), torch.randint(0, 50, (8,))
cases = dict(
    sound=(dense, ids), slice=(torch.randn(8, 26)[:, :13], ids), transposed=(torch.randn(13, 8).t(), ids),
    expanded=(dense[:1].expand(8, 13), ids), double=(dense.double(), ids), int32=(dense, ids.int()),
    rows=(dense, ids[:4]), wide=(torch.randn(8, 14), ids), many=(torch.randn(65, 13), torch.zeros(65).long()),
    one=(dense[:1], ids[:1]),
)
for file, names in (({str(ranges)!r}, cases), ({str(single)!r}, ["one"])):
    package = torch._inductor.aoti_load_package(file)
    for name in names:
        try:
            package(*cases[name])
            print("taken", name)
        except RuntimeError:
            pass
"""
    environment = {**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["taken sound", "taken one"]


@pytest.mark.slow
def test_a_package_that_answers_otherwise_is_not_left(tmp_path, monkeypatch):
    """The file holds another version than the server that it is compared with."""
    server = served()
    other = freeze(tower(1), server.plan, calibration=calibration())

    def run(command, **_):
        given = tensors_from_bytes(Path(command[4]).read_bytes())
        found = {
            f"{size}/0": other.current.module(given[f"{size}/0"], given[f"{size}/1"])
            for size in {name.partition("/")[0] for name in given}
        }
        Path(command[5]).write_bytes(tensors_to_bytes(found))
        return subprocess.CompletedProcess(command, 0, "[]", "")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", empty_file)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(WrongResults, match="answers otherwise"):
        server.package(tmp_path / "x.pt2")
    assert not list(tmp_path.iterdir())
    found = other.package(tmp_path / "x.pt2")
    assert found.equal == 1.0
    assert "0: float32 [B, 13]; 1: int64 [B]: these dtypes, contiguous" in str(found)
    assert found.sha256 in str(found)
    failed = subprocess.CompletedProcess([], 1, "", "ImportError: loka is not to be imported")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(WrongResults, match=r"(?s)without loka.*not to be imported"):
        other.package(tmp_path / "y.pt2")
