"""What an outside check found: models that compute something else, outputs of several kinds, what is not finite."""

import logging
import subprocess
from pathlib import Path

import pytest
import torch
from served import BOTH, ROW, TENSOR, calibration, converted, frozen, plan_for, rows, tower
from torch import nn

from loka.core.exceptions import ServeRefused, WrongResults
from loka.core.storage.files import tensors_from_bytes, tensors_to_bytes
from loka.serve import freeze, load
from loka.serve.freeze import HEADROOM, LEAST_ROWS
from loka.serve.rows import digest, leaves
from loka.serve.sites import as_rows
from loka.serve.watch.agreement import AnswerError, disagreements, error_of
from loka.serve.watch.shadow import Tally

X = [torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Mlp(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(16, 64), nn.Linear(64, 1), head

    def forward(self, x):
        y = self.b(torch.relu(self.a(x))).squeeze(1)
        return y if self.head is None else self.head(y, x)


class Branching(Mlp):
    def forward(self, x):
        far = x[:, 0] > 50
        return super().forward(x) + (self.a.weight.norm() * far if bool(far.any()) else 0)


class Multiplying(Mlp):
    """Torch's GEMMs answer for a weight on the meta device with what memory holds."""

    def forward(self, x):
        far = x[:, 0] > 50
        return super().forward(x) + (torch.mm(x, self.a.weight.t()).sum(1) * far if bool(far.any()) else 0)


class Salted(nn.Module):
    """ids [B, 2], of tables of unequal sizes."""

    def __init__(self, salt=0):
        super().__init__()
        torch.manual_seed(0)
        self.salt, self.table, self.other = salt, nn.Embedding(100, 16), nn.Embedding(7, 16)
        self.a = nn.Linear(16, 1)

    def forward(self, ids):
        return self.a(self.table(ids[:, 0] * (1 + self.salt) % 100) + self.other(ids[:, 1])).squeeze(1)


def served(model, **options):
    return freeze(model, plan_for(model, {"a": ROW}), calibration=X, buckets=(16, 64), **options)


def scored(y, x):
    return {"score": y.sigmoid(), "best": (y * 1e4).long()}


def masked(y, x):
    return {"masked": y.masked_fill(x[:, 0] < 0, -torch.inf), "y": y}


def test_ids_of_calibration_tell_models_apart(tmp_path):
    ids = [torch.stack([torch.randint(n, (64,)) for n in (100, 7)], dim=1) for _ in range(2)]
    model = Salted()
    server = freeze(model, plan_for(model, {"a": ROW}), calibration=ids, buckets=(64,))
    drawn = server.card.form.check_rows(torch.device("cpu"), 200)[0]
    assert drawn[:, 0].max() > 7 > drawn[:, 1].max(), "each place of a row has bounds of its own"
    server.save(tmp_path)
    assert torch.equal(load(tmp_path, Salted())(ids[0]).output, server(ids[0]).output)
    with pytest.raises(ServeRefused, match="computes something else"):
        load(tmp_path, Salted(salt=6))


def test_other_bits_are_told(tmp_path, caplog):
    served(Mlp()).save(tmp_path)
    with caplog.at_level(logging.WARNING, "loka.serve"):
        load(tmp_path, Mlp())
        assert not caplog.records
        load(tmp_path, Mlp(lambda y, x: y * 1.001))
    assert "answers by other bits" in caplog.text
    assert "60.0 dB" in caplog.text
    with pytest.raises(ServeRefused, match="returns other outputs"):
        load(tmp_path, Mlp(lambda y, x: y.double()))


def test_check_rows_know_no_default_dtype(tmp_path):
    server = served(Mlp())
    torch.set_default_dtype(torch.float64)
    try:
        server.save(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    load(tmp_path, Mlp())


def test_each_output_is_compared_by_itself(tmp_path, monkeypatch):
    """Pooled with integers up to 1e4 a score may be anything."""
    server = served(Mlp(scored))
    score, best = server.card.answers
    assert 0 < score.mean_abs < 0.01
    assert best.mean_abs == 0 < best.changed
    server.save(tmp_path / "saved")
    with pytest.raises(ServeRefused, match="output 0 agrees to"):
        load(tmp_path / "saved", Mlp(lambda y, x: scored(y, x) | {"score": 1 - y.sigmoid()}))
    wrong = served(Mlp(lambda y, x: scored(y, x) | {"score": 1 - y.sigmoid()}))

    def answered(command, **options):
        """As a process without loka answers by a file of another model."""
        given, found = tensors_from_bytes(Path(command[4]).read_bytes()), {}
        for name, x in given.items():
            size = name.partition("/")[0]
            found |= {f"{size}/{place}": leaf for place, leaf in enumerate(leaves(wrong(x).output))}
        Path(command[5]).write_bytes(tensors_to_bytes(found))
        return subprocess.CompletedProcess(command, 0, "[]", "")

    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *_, package_path, **__: Path(package_path).touch()
    )
    monkeypatch.setattr(subprocess, "run", answered)
    with pytest.raises(WrongResults, match="output 0"):
        server.package(tmp_path / "x.pt2", batch=(2, 64))
    assert not (tmp_path / "x.pt2").exists()


def test_scores_that_are_masked_out(tmp_path):
    server = served(Mlp(masked))
    assert server(X[0]).nonfinite_rows == int((X[0][:, 0] < 0).sum()), "one of two outputs is finite"
    assert all(error.rms < 10 and error.least_db == 20.0 for error in server.card.answers)
    server.save(tmp_path)
    assert torch.equal(load(tmp_path, Mlp(masked))(X[0]).output["masked"], server(X[0]).output["masked"])
    with pytest.raises(ServeRefused, match="finite in one of the two only"):
        load(tmp_path, Mlp(lambda y, x: masked(y, -x)))


def test_disagreements_by_kind():
    y, ids = torch.linspace(1, 2, 8), torch.arange(8)
    errors = [AnswerError(changed=1.0, max_abs=0.1, mean_abs=0.01, rms=1.0), error_of(ids, ids)]
    assert disagreements([y, ids], [y, ids], errors) == []
    assert disagreements([y * 1.01, ids.clamp_min(4)], [y, ids], errors) == []
    assert "output 0 agrees to 14.0 dB" in disagreements([y * 1.2, ids], [y, ids], errors)[0]
    assert (
        "output 1: 62% of its entries differ, and 50% may" in disagreements([y, ids.clamp_min(5)], [y, ids], errors)[0]
    )
    assert "output 0: 1 of 8" in disagreements([y.where(ids > 0, torch.nan), ids], [y, ids], errors)[0]
    assert disagreements([y * 1.4, ids], [y, ids], None) == []
    nothing = error_of(y[:0], y[:0])
    assert (nothing.changed, nothing.least_db) == (0.0, 20.0)
    turned = torch.polar(y, y)
    assert disagreements([turned * 1.01], [turned], [error_of(turned * 1.2, turned)]) == []
    assert "output 0 agrees to 8.0 dB" in disagreements([turned * 1.4], [turned], [error_of(turned, turned)])[0]


def test_the_error_of_an_answer_by_hand():
    nan = torch.tensor([torch.nan, torch.inf])
    found, exact = (torch.cat([torch.tensor(each), nan]) for each in ([0.0, 2.0], [1.0, 2.0]))
    assert error_of(found, exact) == AnswerError(changed=0.25, max_abs=1.0, mean_abs=0.5, rms=2.5**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_refused_by_name(dtype, tmp_path):
    served(Mlp()).save(tmp_path)
    with pytest.raises(ServeRefused, match=f"a.bias: {dtype}, saved torch.float32"):
        load(tmp_path, Mlp().to(dtype))


def test_answers_are_not_the_callers_memory():
    server = served(Mlp(lambda y, x: {"y": y, "x": x}))
    for count in (16, 9):
        request = X[0][:count].clone()
        answer = server(request).output["x"]
        request.zero_()
        assert torch.equal(answer, X[0][:count])


def test_who_writes_to_an_answer_writes_to_no_buffer_of_the_model():
    class Numbered(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("number", torch.ones(1))

        def forward(self, x):
            return {"y": super().forward(x), "number": self.number.expand(len(x))}

    server = served(Numbered())
    server(X[0]).output["number"][0] = 7.0
    assert server(X[0]).output["number"].eq(1.0).all()


@pytest.mark.parametrize("kind", [Branching, Multiplying])
def test_a_weight_that_only_some_rows_read_stays(kind):
    """The branch reads a weight outside of its site, in the second batch alone."""
    model = kind()
    batches = [X[0], X[1].clone()]
    batches[1][3, 0] = 100.0
    plan = plan_for(model, {"a": ROW})
    server = freeze(model, plan, calibration=batches, buckets=(64,))
    assert not server.card.dropped
    assert torch.equal(server(batches[1]).output, converted(model, plan)(batches[1]))
    lean = freeze(model, plan, calibration=batches[:1], buckets=(64,))
    assert lean.card.dropped
    with pytest.raises(ServeRefused, match="a way through the model that no calibration row took"):
        lean(batches[1])


def test_the_alarm_looks_at_the_requests_own_rows():
    server = frozen(tower(), {"first": TENSOR, "second": TENSOR})
    dense, ids = rows(2)
    dense[1] = 1e4  # the last, which padding repeats
    for _ in range(8):
        server((dense, ids))
    assert not [alarm for alarm in server.alarms() if alarm.kind == "saturation"], "one row, and four are asked for"


def test_requests_without_rows_raise_no_alarm():
    model = tower()
    far = [(dense * 1000, ids) for dense, ids in calibration()]
    server = freeze(model, plan_for(model, {"first": ROW, "second": ROW}), calibration=far, buckets=(64,))
    for _ in range(200):
        server(rows(0))
    assert not server.alarms()


def test_shadows_of_integers_are_counted_and_not_averaged():
    tally = Tally()
    y, ids = torch.ones(4), torch.tensor([0, 10**6, 5, 7])
    tally.note([y, ids], [y + 0.5, ids.roll(1)])
    shadow = tally.shadow()
    assert (shadow.mean_abs, shadow.max_abs, shadow.changed) == (0.5, 0.5, 4)
    tally.note([y, ids], [(y + 0.25).where(ids > 0, torch.nan), ids.clamp_min(5)])
    shadow = tally.shadow()
    assert (shadow.max_abs, shadow.changed, shadow.rows, shadow.nonfinite) == (0.5, 5, 8, 1)
    assert shadow.mean_abs == pytest.approx((4 * 0.5 + 3 * 0.25) / 7)
    tally = Tally()
    tally.note([torch.complex(y, y)], [torch.complex(y, y + 0.5)])
    assert (tally.shadow().mean_abs, tally.shadow().changed) == (0.25, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plan": None}, "there is no plan to freeze by"),
        ({"plan": "plan.json"}, "Plan.load"),
        ({"plan": {"128": None}}, "'128': None"),
        ({"buckets": 16}, "buckets 16 are not rising numbers"),
        ({"buckets": (1.5,)}, "are not rising numbers"),
        ({"autocast": "bf16"}, "autocast='bf16' casts nothing"),
        ({"autocast": torch.float32}, "casts nothing"),
        ({"calibration": {"x": X[0]}}, "calibration is one request"),
        ({"calibration": None}, "0 calibration rows"),
        ({"name": None}, "name=None is no text"),  # it was saved, and no process could load it
    ],
)
def test_arguments_that_are_none(given, said):
    model = Mlp()
    options = {"plan": plan_for(model, {"a": ROW}), "calibration": X} | given
    with pytest.raises(ServeRefused, match=said):
        freeze(model, **options)


def test_outputs_in_fp8_are_refused():
    """torch raised, as it does not tell which of them are finite."""
    with pytest.raises(ServeRefused, match="outputs 1 are in FP8"):
        served(Mlp(head=lambda y, x: (y, y.to(torch.float8_e4m3fn))))


def test_weights_and_files_that_are_none(tmp_path):
    server = served(Mlp())
    wrapped = {f"module.{key}": value for key, value in Mlp().state_dict().items()}
    with pytest.raises(ServeRefused, match=r"without the 'module\.' that a wrapper puts"):
        server.refresh(wrapped)
    with pytest.raises(ServeRefused, match="3 is not in the model"):
        server.refresh({**Mlp().state_dict(), 3: torch.ones(1)})
    with pytest.raises(ServeRefused, match="a Mlp is no state dict"):
        server.refresh(Mlp())
    for batch in ((1,), 5, (1.0, 4.0), (4, 2)):
        with pytest.raises(ServeRefused, match="is no range of rows"):
            server.package(tmp_path / "x.pt2", batch=batch)
    with pytest.raises(ServeRefused, match="is a folder"):
        server.package(tmp_path)


def test_other_modules_are_refused_where_answers_are_near(tmp_path):
    """HardSwish for SiLU agrees to 20 dB and more; a module of another name that computes the same is no other."""

    class Renamed(nn.SiLU):
        pass

    class Written(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    def made(activation):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), activation(), nn.Linear(64, 8)).eval()

    model = made(nn.SiLU)
    freeze(model, plan_for(model, {"0": ROW}), calibration=[torch.randn(64, 16) / 4]).save(tmp_path)
    load(tmp_path, made(nn.SiLU))
    load(tmp_path, made(Renamed))
    load(tmp_path, made(Written))  # which rounds otherwise
    with pytest.raises(ServeRefused, match=r"(?s)built of other modules\n  1: Hardswish, frozen SiLU\n"):
        load(tmp_path, made(nn.Hardswish))


def test_as_few_rows_as_are_asked_for_are_enough():
    assert frozen(tower(), BOTH, calibration=[rows(LEAST_ROWS)]).card.calibration.rows == LEAST_ROWS


def test_the_largest_magnitude_may_be_a_negative_number():
    low = [(-10 - dense.abs(), ids) for dense, ids in calibration()]
    largest = max(float(dense.abs().max()) for dense, _ in low)
    (scale,) = frozen(tower(), {"first": TENSOR}, calibration=low)._scales.values()
    assert scale.item() * 448 == pytest.approx(largest * HEADROOM)


def test_rows_of_another_width_or_type_reach_no_kernel():
    for x, error in ((torch.ones(2, 5), ValueError), (torch.ones(2, 6).double(), TypeError)):
        with pytest.raises(error, match="a: input"):
            as_rows("a", x, 6, torch.float32)


def test_errors_on_the_card_are_of_all_batches():
    dense, ids = (torch.cat(column) for column in zip(*calibration(), strict=True))
    apart, whole = (frozen(tower(), BOTH, calibration=given).card for given in (calibration(), [(dense, ids)]))
    for name in BOTH:
        assert apart.sites[name].sqnr_db == pytest.approx(whole.sites[name].sqnr_db, abs=1e-3)


def test_a_digest_tells_types_and_shapes():
    x = torch.arange(4.0).view(2, 2)
    assert len({digest([[each]]) for each in (x, x.view(torch.int32), x.flatten(), x + 1)}) == 4
