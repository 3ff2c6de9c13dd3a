import json
import os
import pickle
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from forked import run_script
from served import BOTH, GROUP, ROW, TENSOR, Tower, calibration, frozen, plan_for, rows, tower
from sweeps import sweep
from torch import nn

import loka
from loka.core.exceptions import FileRefused, NoKernelFits, NotWritten, PlanMismatch, ServeRefused
from loka.core.recipe import Gemm
from loka.core.storage.alone import InUse
from loka.core.storage.files import sha256_of_file
from loka.serve import freeze, load
from loka.serve.card import Folder
from loka.serve.saving import COMPARED


def saved(folder, candidate=ROW, **options):
    model = tower()
    server = frozen(model, dict.fromkeys(BOTH, candidate), **options)
    server.save(folder)
    return server


FRESH = """
import torch
import loka
from served import Tower, rows
server = loka.serve.load("ranker", Tower())
torch.save([server(rows(50, seed=seed)).output for seed in range(3)], "answers.pt")
"""


@pytest.mark.parametrize("candidate", [TENSOR])
def test_a_fresh_process_answers_bit_for_bit(candidate, tmp_path):
    server = saved(tmp_path / "ranker", candidate, autocast=torch.bfloat16, name="clicks")
    run_script(FRESH, name="fresh", cwd=tmp_path, output=tmp_path / "printed")
    for seed, answer in enumerate(torch.load(tmp_path / "answers.pt")):
        assert torch.equal(answer, server(rows(50, seed=seed)).output)


@pytest.mark.parametrize("candidate", [ROW, GROUP, TENSOR])
def test_loaded_equals_saved_and_can_be_refreshed(candidate, tmp_path):
    server = saved(tmp_path, candidate, name="clicks")
    model = tower(3)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = load(tmp_path, model)
    assert loaded.card == server.card
    assert "clicks" in str(loaded)
    assert torch.equal(loaded(rows(50)).output, server(rows(50)).output)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for one in (loaded, server):
        one.refresh(tower(1).state_dict())
    assert torch.equal(loaded(rows(50)).output, server(rows(50)).output)
    loaded.save(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again", model)(rows(50)).output, server(rows(50)).output)


def test_a_folder_that_is_a_file_is_told_and_stands(tmp_path):
    (file := tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(NotWritten, match=r"(?s)cannot write .*notes\.txt\n.*File exists.*Way out"):
        saved(file)
    assert file.read_text() == "kept"


def test_kernels_of_training_are_not_asked_for(tmp_path, monkeypatch):
    """A server runs `output` alone: what trained the model may be missing where it is served, or be wrong there."""
    plan = plan_for(tower(), dict.fromkeys(BOTH, (ROW, TENSOR, "fbgemm:rowwise_e4m3")))
    checked = []

    def wrong_in_backward(name, *, gemm, device):
        checked.append((name, gemm))
        return None if gemm is Gemm.OUTPUT else "wrong"

    monkeypatch.setattr(sys.modules["loka.planner.convert"], "self_check", wrong_in_backward)
    with pytest.raises(NoKernelFits, match="fbgemm"):
        loka.convert(tower(), plan)
    server = freeze(tower(), plan, calibration=calibration())
    server.save(tmp_path)
    assert torch.equal(load(tmp_path, Tower())(rows(50)).output, server(rows(50)).output)
    assert set(checked) == {(ROW, Gemm.OUTPUT)}


def test_weights_lie_in_eight_bits(tmp_path):
    class Wide(nn.Sequential):
        pass

    model = Wide(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    frozen(model, {"0": ROW, "2": ROW}, calibration=[torch.randn(64, 256)]).save(tmp_path)
    compared = 4 * COMPARED * 256  # bytes of outputs that loaded models are compared by
    size = (tmp_path / "weights.safetensors").stat().st_size - compared
    assert size < 0.55 * 2 * 2 * 256 * 512
    assert not (tmp_path / "precise.safetensors").exists()


def test_the_shadow_needs_the_weights_in_high_precision(tmp_path):
    saved(tmp_path / "without")
    with pytest.raises(ServeRefused, match="no weights in high precision"):
        load(tmp_path / "without", tower(), shadow=0.5)
    server = saved(tmp_path / "with", shadow=0.5)
    loaded = load(tmp_path / "with", tower(1), shadow=1.0)
    loaded(rows(64)), server(rows(64))
    assert loaded.shadow() == server.shadow()
    assert load(tmp_path / "with", tower(1)).current.precise is None


def _cut(name, last=False):
    def change(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: -1 if last else len(data) // 2])

    return change


def _gone(name):
    return lambda folder: (folder / name).unlink()


def _flip(folder):
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-7] ^= 1
    (folder / "weights.safetensors").write_bytes(data)


def _edited(folder):
    card = folder / "card.json"
    card.write_text(card.read_text().replace("160", "161"))


def _of_another(folder):
    plan_for(tower(), {"first": ROW}).save(folder / "plan.json")


def _points_out(folder):
    shutil.copy(folder / "plan.json", folder.parent / "outside.json")
    record = Folder.load(folder / "card.json")
    files = {**record.files, "../outside.json": sha256_of_file(folder.parent / "outside.json")}
    replace(record, files=files).save(folder / "card.json")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (shutil.rmtree, "no such file"),
        (_gone("card.json"), "no such file"),
        (_gone("plan.json"), "plan.json cannot be read"),
        (_gone("weights.safetensors"), "weights.safetensors cannot be read"),
        (_cut("card.json"), "not complete JSON"),
        (_cut("card.json", last=True), "lacks its last newline"),
        (_cut("plan.json"), "plan.json is not the file that was saved"),
        (_cut("weights.safetensors"), "weights.safetensors is not the file"),
        (_flip, "weights.safetensors is not the file"),
        (_edited, "checksum differs"),
        (_of_another, "plan.json is not the file"),
        (_points_out, r"outside.json is not the file"),
        (lambda folder: plan_for(tower(), BOTH).save(folder / "card.json"), "it is a loka-plan"),
    ],
)
def test_damaged_and_foreign_folders(damage, told, tmp_path):
    saved(tmp_path / "ranker")
    damage(tmp_path / "ranker")
    with pytest.raises(FileRefused, match=told) as refused:
        load(tmp_path / "ranker", tower())
    assert refused.value.way_out


class Silu(Tower):
    def forward(self, dense, ids):
        x = torch.cat([dense, self.table(ids)], dim=1)
        x = torch.tanh(self.norm(self.first(x)))
        return self.logit(torch.tanh(self.second(x))).squeeze(1)


class Clamped(Tower):
    """None of the first four rows, as these weights have it."""

    def forward(self, dense, ids):
        return super().forward(dense, ids).clamp(max=-0.25)


class WithoutNorm(Tower):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()


@pytest.mark.parametrize(
    ("build", "error", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(24, 37)), PlanMismatch, "second"),
        (WithoutNorm, ServeRefused, "norm.weight is not in the model"),
        (Silu, ServeRefused, "computes something else"),
        (Clamped, ServeRefused, "computes something else"),
        (lambda: Tower().double(), ServeRefused, "other dtypes than the one that was frozen"),
    ],
)
def test_other_models_are_refused(build, error, told, tmp_path):
    saved(tmp_path)
    with pytest.raises(error, match=told) as refused:
        load(tmp_path, build())
    assert refused.value.way_out


def test_another_machine_is_refused(tmp_path):
    saved(tmp_path)
    record = Folder.load(tmp_path / "card.json")
    machine = replace(record.card.machine, device="NVIDIA H200", target="sm_90", driver="580")
    replace(record, card=replace(record.card, machine=machine)).save(tmp_path / "card.json")
    with pytest.raises(PlanMismatch, match=r"(?s)frozen on NVIDIA H200.*device: cpu here, NVIDIA H200 there"):
        load(tmp_path, tower())


def test_a_missing_kernel_is_refused(tmp_path, monkeypatch):
    saved(tmp_path)
    from loka.kernels.gemm import registry

    held = registry.candidate_named(ROW)
    gone = replace(held, kernel=replace(held.kernel, missing=lambda: "not installed (pip install it)"))
    registry.require_supported.cache_clear()
    monkeypatch.setattr(registry, "candidate_named", lambda name: gone)
    with pytest.raises(NoKernelFits, match=r"emulated:rowwise_e4m3 cannot run"):
        load(tmp_path, tower())
    monkeypatch.undo()
    registry.require_supported.cache_clear()


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("shadow", sweep([0.0, 1.0], [1.0]))
def test_a_save_that_fails_leaves_the_folder_as_it_was(shadow, times, tmp_path, monkeypatch):
    """Wherever it does: once the card was gone, what was new was removed with the rest. What no rename put back, as
    after a kill, the next save puts back."""
    saved(tmp_path, shadow=shadow)
    other, replaced = frozen(tower(1), BOTH, shadow=1.0 - shadow), os.replace
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / ".saving").mkdir()  # of a process that was killed
    for done in range(10):  # 3 or 4 files are written, as many put in place, and 4 or 3 of before put aside
        turns = iter([False] * done + [True] * times)

        def fails(source, target, turns=turns):
            if next(turns, False):
                raise OSError(5, "Input/output error")
            replaced(source, target)

        monkeypatch.setattr("os.replace", fails)
        with pytest.raises(NotWritten):
            other.save(tmp_path)
        monkeypatch.setattr("os.replace", replaced)
        if times > 1:
            with monkeypatch.context() as full:
                full.setattr("loka.serve.saving.write_tensors", lambda *_: (_ for _ in ()).throw(NotWritten("full")))
                with pytest.raises(NotWritten):
                    other.save(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    other.save(tmp_path)
    assert torch.equal(load(tmp_path, tower())(rows(50)).output, other(rows(50)).output)


def test_a_second_process_that_saves_into_a_folder_is_refused(tmp_path, monkeypatch):
    """It removed what the first one had written so far."""
    first, second, write = frozen(tower(), BOTH), frozen(tower(1), BOTH), loka.serve.saving.write_tensors

    def meanwhile(path, tensors):
        write(path, tensors)
        monkeypatch.undo()
        with pytest.raises(InUse, match="another process is saving"):
            second.save(tmp_path)

    monkeypatch.setattr("loka.serve.saving.write_tensors", meanwhile)
    for server in (first, second):
        server.save(tmp_path)
        assert torch.equal(load(tmp_path, tower())(rows(50)).output, server(rows(50)).output)


def test_a_process_of_another_default_dtype_compares_by_the_same_rows(tmp_path, caplog):
    """Rows that are put between bounds were drawn in that dtype: sound folders were refused, or warned of."""
    server, model = saved(tmp_path), tower(1)
    torch.set_default_dtype(torch.float64)
    try:
        loaded = load(tmp_path, model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(loaded(rows(50)).output, server(rows(50)).output)
    assert not caplog.messages


def test_a_server_is_not_pickled():
    with pytest.raises(ServeRefused, match=r"(?s)neither pickled nor copied.*save\(folder\)"):
        pickle.dumps(frozen(tower(), BOTH))


def test_a_folder_in_the_place_of_a_file_is_told_while_the_card_is_there(tmp_path):
    server = saved(tmp_path)
    (tmp_path / "precise.safetensors").mkdir()
    with pytest.raises(NotWritten, match=r"(?s)Is a directory.*is as it was before"):
        server.save(tmp_path)
    assert torch.equal(load(tmp_path, tower())(rows(50)).output, server(rows(50)).output)


def test_the_card_holds_what_it_says(tmp_path):
    saved(tmp_path, name="clicks of Monday")
    content = json.loads((tmp_path / "card.json").read_text())["content"]["card"]
    assert content["calibration"]["name"] == "clicks of Monday"
    assert (content["calibration"]["rows"], content["calibration"]["batches"]) == (160, 4)
    assert len(content["calibration"]["sha256"]) == 64
    assert content["machine"]["torch"] == torch.__version__
    assert 20 < content["sites"]["first"]["sqnr_db"] < 40
    (answers,) = content["answers"]
    assert 0 < answers["mean_abs"] < answers["max_abs"] < answers["rms"]
    other = frozen(tower(), BOTH, calibration=[*calibration()[:3], rows(40, seed=9)])
    assert other.card.calibration.sha256 != content["calibration"]["sha256"]


def test_models_of_weights_in_fp8_alone_are_served(tmp_path):
    """No other tensor is left to tell where they are."""

    def made(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False)).eval()

    model, x = made(0), torch.randn(40, 64)
    server = freeze(model, plan_for(model, dict.fromkeys(("0", "2"), ROW)), calibration=[x])
    assert set(server.card.dropped) == {"0.weight", "2.weight"}
    server.save(tmp_path)
    loaded = load(tmp_path, made(1))
    assert torch.equal(loaded(x).output, server(x).output)
    for each in (server, loaded):
        each.refresh(made(2).state_dict())
    assert torch.equal(loaded(x).output, server(x).output)


class Bounds(Tower):
    """Numbers that no row of the check reaches, of which none is in a folder; and how many rows it was called with."""

    def __init__(self, limit=1000, edge=1000.0):
        super().__init__()
        self.limit, self.options = limit, {"most": 1000.0}
        self.register_buffer("edge", torch.tensor([edge]), persistent=False)

    def get_extra_state(self):
        return self.options

    def set_extra_state(self, state):
        self.options = state

    def forward(self, dense, ids):
        self.rows = len(ids)
        dense = torch.minimum(dense.clamp(max=self.limit).clamp(max=self.options["most"]), self.edge)
        return super().forward(dense, ids)


def test_numbers_that_no_folder_holds_are_told(tmp_path, caplog):
    """Also where a refresh brought them; those of forward itself are no matter."""
    server = frozen(Bounds().eval(), dict.fromkeys(BOTH, ROW))
    server.save(tmp_path)
    server(rows(3))
    load(tmp_path, Bounds().eval())
    assert not caplog.messages
    load(tmp_path, Bounds(limit=500, edge=500.0).eval())
    assert "this Bounds is not the one that was saved in limit, edge, and no folder holds that" in caplog.messages[-1]
    server.refresh({**server.current.module.state_dict(), **tower(1).state_dict(), "_extra_state": {"most": 500.0}})
    server.save(tmp_path)
    load(tmp_path, Bounds().eval())
    assert "this Bounds is not the one that was saved in options, and" in caplog.messages[-1]


def test_another_method_is_told(tmp_path, caplog, monkeypatch):
    """A number in it that no row of the check reaches; what it calls is not looked at."""
    frozen(Bounds().eval(), dict.fromkeys(BOTH, ROW)).save(tmp_path)
    forward = Bounds.forward

    def other(self, dense, ids):
        return forward(self, dense.clamp(max=500.0), ids)

    monkeypatch.setattr(Bounds, "forward", other)
    load(tmp_path, Bounds().eval())
    assert "this Bounds is not the one that was saved in the code of Bounds (Python " in caplog.messages[-1]
