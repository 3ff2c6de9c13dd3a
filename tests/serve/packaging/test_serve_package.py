import math
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
from torch import nn

from loka.core.exceptions import FileRefused, MissingLibrary, NotWritten, ServeRefused, WrongResults
from loka.core.storage.files import sha256_of_file, tensors_from_bytes, tensors_to_bytes
from loka.serve import Server, freeze
from loka.serve.packaging import aot, weights
from loka.serve.packaging.aot import Agreement, _most_apart, _typical, tried, unpackaged
from loka.serve.packaging.checksum import checksum_of, write_checksum
from loka.serve.packaging.exported import Contents, PackagedSite, contents_of, exported, tensors_of
from loka.serve.rows import leaves
from loka.serve.run import runner_of
from loka.serve.sites import frozen_sites
from loka.serve.watch.agreement import AnswerError

EXACT = Agreement(sizes=(1,), equal=1.0, mean_abs=0.0, max_abs=0.0, sqnr_db=math.inf)


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


def test_weights_are_for_a_package_of_their_own(monkeypatch, tmp_path):
    server, junk = served(), tmp_path / "junk.pt2"
    junk.write_text("no package")
    for path in (junk, tmp_path / "none.pt2"):
        with pytest.raises(FileRefused, match=r"(?s)no package that takes weights.*Way out"):
            server.package_weights(path, tmp_path / "w.pt")
    model = exported(server.current.module, server.plan, runner_of(server.card))
    read = set(tensors_of(model))
    contents = contents_of(model, (1, 64), read)
    assert [name.partition(".model.")[2] for name in contents.written] == [
        "logit.bias"
    ]  # what it would be without `small`
    monkeypatch.setattr(weights, "_contents_of", lambda path: Contents.from_json(contents.to_json()))
    given = []
    monkeypatch.setattr(weights, "checked", lambda *all_of: (EXACT, given.append(all_of) or sorted(all_of[-1])))
    server.package_weights(junk, tmp_path / "w.pt")
    assert given[0][4] == (1, 64)
    held = torch.load(tmp_path / "w.pt", weights_only=True)
    assert held.keys() == {name for name, tensor in tensors_of(model).items() if tensor.numel()}
    server.refresh(tower(1).state_dict())
    with pytest.raises(ServeRefused, match=r"(?s)holds numbers that differ.*logit\.bias.*make the package anew"):
        server.package_weights(junk, tmp_path / "w.pt")
    other = freeze(Cross().eval(), cross_plan(Cross(), ROW), calibration=[torch.randn(64, 24)])
    with pytest.raises(ServeRefused, match="a package of another server"):
        other.package_weights(junk, tmp_path / "w.pt")


class Small(nn.Module):
    """What Inductor would write into code: scalars, few entries, one value all over; and a weight of two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 1)
        self.again = self.second
        nn.init.zeros_(self.first.bias)
        self.scale, self.ends = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2))
        self.register_buffer("ones", torch.ones(32))

    def forward(self, x):
        x = torch.relu(self.first(x) * (self.ones * 2.0)).clamp(max=9.0)
        return (self.second(x) + self.again(x)) * self.scale * self.ends.sum() * torch.tensor(0.5)


def test_all_that_versions_differ_in_are_named_constants():
    """Of a program that reads them, none is a number in its code, and what it computes is what the model does."""
    torch.manual_seed(0)
    model = Small().eval()
    server = freeze(model, plan_for(model, {"first": ROW}), calibration=[torch.randn(64, 24)])
    module = exported(server.current.module, server.plan, runner_of(server.card))
    x = torch.randn(5, 24)
    program = torch.export.export(module, (x,), strict=False)
    assert contents_of(module, (5, 5), aot._read(program)).written == {}
    read = {name.partition(".")[2] for name in aot._read(program)}
    assert read >= {"sites.0.weight", "sites.0.scale", "model.first.bias", "model.ones"}
    assert len(read & {"model.second.weight", "model.again.weight"}) == 1
    assert {f"small.{place}" for place in range(3)} <= read
    with torch.no_grad():
        assert torch.equal(program.module()(x), server.current.module(x))


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


class Beside(Tower):
    """Its second output is computed in high precision alone."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(13, 4)

    def forward(self, dense, ids):
        return super().forward(dense, ids), torch.softmax(self.aux(dense).tanh().exp().sin(), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_output_that_fp8_does_not_touch_may_round_otherwise(autocast, tmp_path):
    torch.manual_seed(0)
    server = frozen(Beside().eval(), BOTH, autocast=autocast)
    assert server.card.answers[1].mean_abs == 0.0
    found = server.package(tmp_path / "x.pt2", batch=(1, 64))
    for one, two in zip(found_leaves(found, rows(50)), leaves(server(rows(50)).output), strict=True):
        torch.testing.assert_close(one, two, atol=1e-2, rtol=0)


def test_how_far_apart_a_package_may_be():
    """A few units in the last place where FP8 changes nothing; a tenth of what it changes elsewhere."""
    untouched = AnswerError(changed=0.0, max_abs=0.0, mean_abs=0.0, rms=0.5)
    f32, bf16 = torch.float32, torch.bfloat16
    assert _most_apart(untouched, 0.5, [f32]) == 8 * 2.0**-23 * 0.5
    assert _most_apart(untouched, 0.5, [f32, bf16, torch.float8_e4m3fn, torch.int64]) == 8 * 2.0**-7 * 0.5
    assert _most_apart(untouched, 0.0, [f32]) == 0.0
    touched = AnswerError(changed=1.0, max_abs=0.04, mean_abs=0.01, rms=0.5)
    assert _most_apart(touched, 0.5, [bf16]) == pytest.approx(1e-3)
    hardly = AnswerError(changed=0.1, max_abs=1e-8, mean_abs=1e-9, rms=0.5)
    assert _most_apart(hardly, 0.5, [bf16]) == 8 * 2.0**-23 * 0.5


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
