import pytest
import torch
from torch import nn

import loka
from loka.core.budget import Budget
from loka.core.exceptions import DataRefused, EffectUnknown, UnknownName
from loka.core.numerics.effect import Effect
from loka.core.records.parts import LEAST_ROWS, Part, beyond_sum, joined, judged
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.probe import merge_stats, renew_effects
from loka.probe.model_effects.alike import alike
from loka.probe.model_effects.segment_rows import SegmentRows
from loka.statistics.effect_casts import CASTS
from loka.train import Segments
from loka.train.automatic.joint_effect import joint_effect

TASKS = ("click", "buy")
THIRD = Segments(("high",), lambda batch: torch.where(batch[0][:, 0] > 2.0, 0, -1), by="first column")
ROWS = {"tasks": TASKS, "segments": THIRD, "forward": lambda model, batch: model(batch[0])}


class Two(nn.Module):
    """The second logit reads what the first does not: its own tower."""

    def __init__(self):
        super().__init__()
        self.shared, self.tower = nn.Linear(24, 32), nn.Linear(32, 16)
        self.click, self.buy = nn.Linear(32, 1), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.relu(self.shared(x))
        return torch.cat([self.click(h), self.buy(torch.relu(self.tower(h)))], dim=1)


def batches(rows, seed=1, size=128):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 24, generator=generator)
    labels = (torch.rand(rows, 2, generator=generator) < torch.tensor([0.4, 0.1])).float()
    return list(zip(x.split(size), labels.split(size), strict=True))


def labels_of(batch):
    return batch[1]


def probed(model):
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        for x, _ in batches(256, seed=0):
            model(x).sum().backward()
    return probe.stats()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = Two()
    with torch.no_grad():
        for head in (made.click, made.buy):
            head.weight.mul_(3)
            head.bias.sub_(1)
    return made


@pytest.fixture(scope="module")
def renewed(model):
    return renew_effects(model, probed(model), batches(24_000), labels=labels_of, segment_rows=256, **ROWS)


@pytest.fixture(scope="module")
def report(renewed):
    return loka.measure(renewed, device="cpu", candidates=("emulated:rowwise_e4m3",))


def test_all_parts_are_known_and_each_segment_has_its_rows(renewed):
    assert list(renewed.parts) == ["click", "click, high", "buy", "buy, high"]
    assert not [part.unsupported for part in renewed.parts.values() if part.unsupported]
    assert {part.rows for part in renewed.parts.values()} == {1536, 256}
    high = renewed.parts["buy, high"]
    assert 256 <= high.read < 24_000 * 0.04, "it stops where it has enough, and knows how many went by"


def test_a_task_reads_as_a_model_that_has_it_alone(model, renewed):
    """Its own logit alone, on the same rows: the same numbers, not a share of the sum."""
    for at, task in enumerate(TASKS):
        alone = renew_effects(
            model,
            probed(model),
            batches(24_000),
            logits=lambda z, at=at: z[:, at],
            forward=ROWS["forward"],
            base_rate=None,
        )
        for path in ("shared", *(("tower",) if at else ())):
            mine = renewed.layers[path].effects_by_part[task]["rowwise_e4m3"]
            theirs = alone.layers[path].effects["rowwise_e4m3"]
            assert mine.kl().value == pytest.approx(theirs.kl().value, rel=1e-4), (task, path)
    assert renewed.layers["tower"].effects_by_part["click"]["rowwise_e4m3"].total == 0


def test_what_all_tasks_lose_is_what_each_does(renewed):
    """Losses add up; the sum of the passes by task is free of the signs that one pass for all has."""
    both = [renewed.layers["shared"].effects_by_part[task]["rowwise_e4m3"].loss().value for task in TASKS]
    assert sum(both) == pytest.approx(renewed.layers["shared"].effects["rowwise_e4m3"].loss().value, rel=0.15)


def test_segments_leave_the_effects_of_all_rows_as_they_are(model, renewed):
    plain = renew_effects(model, probed(model), batches(24_000), forward=ROWS["forward"], logits=lambda z: z)
    for path, layer in plain.layers.items():
        assert layer.effects == renewed.layers[path].effects
        for name, operand in layer.operands.items():
            for table, tensor in operand.tensors.items():
                assert torch.equal(tensor, renewed.layers[path].operands[name].tensors[table]), (path, table)


def test_a_segment_is_what_joint_effects_of_its_rows_say(model, report):
    plan = loka.plan(report, Budget(ne={"click": 1.0, "buy": 1.0}, segments={"high": 1.0}, min_sqnr_db=None))
    x = torch.cat([x[x[:, 0] > 2.0] for x, _ in batches(100_000, seed=9)])
    for at, task in enumerate(TASKS):
        counted = torch.cat([y[x[:, 0] > 2.0] for x, y in batches(24_000)])[:, at].mean().item()
        found = joint_effect(
            model, plan, [x], forward=lambda model, x, at=at: model(x)[:, at], base_rate=counted, part=f"{task}, high"
        )
        assert found.budget == 1.0
        assert 0.7 < found.ratio < 1.4


def test_too_few_rows_say_how_many_are_missing_and_plans_refuse_a_limit(model):
    few = renew_effects(model, probed(model), batches(1500), labels=labels_of, **ROWS)
    part = few.parts["click, high"]
    assert part.rows == part.read < LEAST_ROWS
    assert part.missing >= LEAST_ROWS - part.rows
    assert f"about {part.missing} more are needed" in part.unsupported
    report = loka.measure(few, device="cpu", candidates=("emulated:rowwise_e4m3",))
    with pytest.raises(EffectUnknown, match="not known well enough") as refused:
        loka.plan(report, Budget(segments={"high": 1e-4}))
    assert part.unsupported in "\n".join(refused.value.why)
    loka.plan(report, Budget(ne=1e-4))  # without the limit nobody needs to know


@pytest.mark.slow
def test_labels_that_are_alike_in_a_segment_promise_nothing(model):
    rows = [(x, torch.where((x[:, :1] > 2.0), 0.0, y)) for x, y in batches(24_000)]
    found = renew_effects(model, probed(model), rows, labels=labels_of, segment_rows=200, **ROWS)
    assert "labels are negative" in found.parts["click, high"].unsupported
    assert not found.parts["click"].unsupported
    assert "click, high" not in found.layers["shared"].effects_by_part


@pytest.mark.slow
def test_ranks_that_each_have_too_few_have_enough_together(model):
    halves = [
        renew_effects(model, probed(model), batches(6000, seed=seed), labels=labels_of, **ROWS) for seed in (3, 4)
    ]
    both = merge_stats(halves)
    name = "buy, high"
    assert both.parts[name].rows == sum(half.parts[name].rows for half in halves)
    assert both.parts[name].width < max(half.parts[name].width for half in halves)


def test_a_budget_by_task_binds_where_it_is_tight(report):
    """The tower costs `buy` alone: what `click` may spend does not matter to it."""
    loose = loka.plan(report, Budget(ne={"click": 1.0, "buy": 1.0}, min_sqnr_db=None))
    assert loose.decisions["tower/output"].candidate != "hp"
    for part in TASKS:
        assert loose.kl_of(part).value == pytest.approx(
            sum(d.kl_of(part).value for d in loose.decisions.values() if d.kl_of(part))
        )
    buy = loka.plan(report, Budget(ne={"click": 1.0, "buy": 1e-12}, min_sqnr_db=None))
    assert {d.candidate for d in buy.decisions.values() if d.site.endswith("output")} == {"hp"}
    assert "KL/H of buy" in buy.decisions["tower/output"].rejected["emulated:rowwise_e4m3"]
    click = loka.plan(report, Budget(ne={"click": 0.0, "buy": 1.0}, min_sqnr_db=None))
    assert click.decisions["shared/output"].candidate == "hp"
    assert click.decisions["tower/output"].candidate != "hp"


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(4))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


@pytest.mark.slow
def test_layers_that_round_one_tensor_alike_lose_more_than_their_sum_and_the_plan_says_how_much():
    """Four experts that learnt the same: what the input's rounding does to each adds before it is squared."""
    torch.manual_seed(0)
    model = Experts()
    for expert in model.experts:
        expert.load_state_dict(model.experts[0].state_dict())
    every = Segments(("every",), lambda batch: torch.zeros(len(batch[0]), dtype=torch.int64), by="")
    rows = [(x, y[:, 0]) for x, y in batches(24_000)]
    found = renew_effects(
        model, probed(model), rows, segments=every, labels=labels_of, forward=ROWS["forward"], segment_rows=1536
    )
    report = loka.measure(found, device="cpu", candidates=("emulated:rowwise_e4m3",))
    plan = loka.plan(report, Budget(segments={"every": 1.0}, min_sqnr_db=None))
    given = {"part": "every", "forward": ROWS["forward"], "base_rate": torch.cat([y for _, y in rows]).mean().item()}
    measured = joint_effect(model, plan, batches(4000, seed=9), **given).measured.value
    together = sum(kl_by_layer(plan).values())
    assert measured > 3 * together
    together += beyond_sum(found.parts["every"].alike, plan.output_recipes, kl_by_layer(plan))
    assert together == pytest.approx(measured, rel=0.25)
    assert any("within its limit of 1" in note and "together" in note for note in plan.notes)
    whole = loka.plan(report, Budget(ne=1.0, min_sqnr_db=None))
    assert any(note.startswith("by the correlations of what they change") for note in whole.notes)
    for limits in ({"segments": {"every": measured / 2}}, {"ne": measured / 2}):
        tight = loka.plan(report, Budget(**limits, min_sqnr_db=None))
        assert 0 < joint_effect(model, tight, batches(4000, seed=9), **given).measured.value <= measured / 2
    forced = loka.plan(report, Budget(segments={"every": measured / 2}), force={"*": "emulated:rowwise_e4m3"})
    assert any("ABOVE its limit" in note for note in forced.notes)


@pytest.mark.slow
def test_changes_that_cancel_lose_less_than_their_sum():
    """Two layers make the same logit, one of them with the other sign: what both round alike cancels."""
    torch.manual_seed(0)
    model = Experts()
    model.experts = model.experts[:2]
    model.experts[1].load_state_dict(model.experts[0].state_dict())
    with torch.no_grad():
        model.experts[1][2].weight.mul_(-0.9)
    rows = [(x, y[:, 0]) for x, y in batches(12_000)]
    found = renew_effects(model, probed(model), rows, forward=ROWS["forward"])
    assert found.alike["experts.0.0"]["experts.1.0"] < -0.99
    report = loka.measure(found, device="cpu", candidates=("emulated:rowwise_e4m3",))
    plan = loka.plan(report, Budget(ne=1.0, min_sqnr_db=None))
    summed = {d.path: d.kl.value for d in plan.decisions.values() if d.kl}
    measured = joint_effect(model, plan, batches(4000, seed=9), forward=ROWS["forward"]).measured.value
    together = sum(summed.values()) + beyond_sum(found.alike, plan.output_recipes, summed)
    assert measured < 0.1 * sum(summed.values())
    assert together == pytest.approx(measured, abs=0.02 * sum(summed.values()))
    assert any("within its limit of 1" in note for note in plan.notes)


def test_of_many_layers_the_pairs_are_kept_that_say_most():
    """Three layers of a hundred make what is lost; the others' pairs are as correlated, and weigh nothing."""
    torch.manual_seed(0)
    common = torch.randn(1000, 1)
    changes = [(common + torch.randn(1000, len(CASTS))) * (1.0 if at < 3 else 1e-3) for at in range(100)]
    paths = [f"layer{at}" for at in range(100)]
    every, few = (
        {a: {b: r for b, r in others.items() if b in paths} for a, others in found.items() if a in paths}
        for found in (alike(paths, changes, None, pairs) for pairs in (20_000, 3))
    )  # of the reference recipe
    assert sum(map(len, every.values())) == 100 * 99 / 2
    assert {a: set(others) for a, others in few.items() if others} == {
        "layer0": {"layer1", "layer2"},
        "layer1": {"layer2"},
    }
    assert few["layer1"]["layer2"] == every["layer1"]["layer2"]
    assert every["layer0"]["layer99"] == pytest.approx(0.5, abs=0.1)


def kl_by_layer(plan):
    return {d.path: d.kl_of("every").value for d in plan.decisions.values() if d.kl_of("every")}


def test_one_number_is_a_limit_for_each_task(report):
    plan = loka.plan(report, Budget(ne=3e-4))
    assert plan.limits == {"click": 3e-4, "buy": 3e-4}
    assert plan.kl_limit is None
    assert "click" in plan.summary()


@pytest.mark.slow
def test_tasks_that_nobody_named_are_said_to_be_together(model, report):
    plain = renew_effects(model, probed(model), batches(2000), forward=ROWS["forward"], logits=lambda z: z)
    summed = loka.measure(plain, device="cpu", candidates=("emulated:rowwise_e4m3",))
    together = "KL/H is that of 2 tasks together"
    assert any(note.startswith(together) for note in loka.plan(summed, Budget(ne=1e-3)).notes)
    assert not any(note.startswith(together) for note in report.notes)


def test_records_keep_it_all(report, renewed, tmp_path):
    budget = Budget(ne={"click": 1e-3, "buy": 2e-3}, segments={"high": 5e-3})
    plan = loka.plan(report, budget)
    plan.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json") == plan
    renewed.save(tmp_path / "stats")
    assert Stats.load(tmp_path / "stats").parts == renewed.parts
    report.save(tmp_path / "report.json")
    assert loka.plan(Report.load(tmp_path / "report.json"), budget).to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget(ne={"click": 1e-4}), "no limit for buy"),
        (Budget(ne={"click": 1e-4, "cvr": 1e-4}), "'cvr'"),
        (Budget(segments={"domain = 8": 1e-4}), "it knows that of 'high'"),
    ],
)
def test_names_that_nobody_probed_are_refused(report, budget, said):
    with pytest.raises(UnknownName) as refused:
        loka.plan(report, budget)
    assert said in str(refused.value)


def test_settings_that_cannot_be_are_refused(model):
    with pytest.raises(ValueError, match="an increase allowed is 0 or more"):
        Budget(segments={"a": -1.0})
    with pytest.raises(ValueError, match="names no task"):
        Budget(ne={})
    for task, name in ("b", ""), ("a, x", "x"):
        with pytest.raises(ValueError, match="to differ"):
            renew_effects(model, probed(model), [], tasks=("a", task), segments=Segments((name,), THIRD.of, by=""))
    with pytest.raises(ValueError, match="3 names of tasks"):
        renew_effects(model, probed(model), batches(256), tasks=("a", "b", "c"), forward=ROWS["forward"])
    given = iter(batches(256))
    with pytest.raises(ValueError, match="a, for 2 logits"):
        renew_effects(
            model, probed(model), given, tasks=("a",), forward=lambda model, batch: {"logits": model(batch[0])}
        )
    assert next(given)
    with pytest.raises(ValueError, match="pass tasks="):
        renew_effects(model, probed(model), batches(256), segments=THIRD, forward=ROWS["forward"], logits=lambda z: z)


@pytest.mark.parametrize(
    ("labels", "places", "said"),
    [
        (lambda y: y.where(y > 0, -1), 128, "-1 for (click|buy), high"),
        (lambda y: y.where(y < 1, torch.nan), 128, "nan for"),
        (lambda y: y.T, 128, "2, 128., not .*click, buy, high"),
        (lambda y: y[:, [0, 1, 1]], 128, "128, 3"),
        (lambda y: y[:, 0], 128, ".128., not"),
        (lambda y: y, 300, "300 places in .*high.*"),
    ],
)
def test_labels_and_places_that_do_not_fit_are_refused(model, labels, places, said):
    rows = {**ROWS, "segments": Segments(("high",), lambda batch: torch.zeros(places).long(), by="x")}
    with pytest.raises(DataRefused, match=said):
        renew_effects(model, probed(model), batches(128), labels=lambda batch: labels(batch[1]), **rows)


@pytest.mark.slow
def test_soft_labels_are_taken_and_others_not_asked(model):
    def renew(labels, **others):
        return renew_effects(model, probed(model), batches(256), labels=labels, **ROWS, **others).parts

    assert renew(lambda batch: batch[1].where(batch[0][:, :1] > 2.0, -1)) == renew(labels_of)
    renew(lambda batch: batch[1] * 0.7)
    renew(lambda batch: batch[1] - 2, weights=lambda batch: torch.ones(128))


@pytest.mark.slow
def test_h_is_of_rows_with_labels(model):
    rows = [(x, None if at % 2 else torch.full((128, 2), 0.9)) for at, (x, _) in enumerate(batches(12_800))]
    some, every = (
        renew_effects(model, probed(model), rows, labels=of, **ROWS).layers["shared"].effects_by_part["buy, high"]
        for of in (labels_of, lambda _: rows[0][1])
    )
    assert some["rowwise_e4m3"].kl().value == pytest.approx(every["rowwise_e4m3"].kl().value)


@pytest.mark.parametrize(("terms", "said"), [([1.0, 2.0] * 53, "22 more"), ([1.0] * 150, "no upper end")])
def test_rows_that_tell_nothing_do_not_count(terms, said):
    effect = Effect.of(terms, [[0.5]] * len(terms))
    both = judged(joined(Part(rows=109, unknown="alike"), Part(rows=len(terms))), [{"rowwise_e4m3": effect}])
    assert said in both.unsupported


def test_a_layer_without_an_upper_end_hides_no_other():
    """As an expert that hardly a row reaches: it stays in hp, and a limit on the part goes by the rest."""
    known, alike = (Effect.of(terms, [[0.5]] * 150) for terms in ([1.0, 2.0] * 75, [1.0] * 150))
    assert not judged(Part(rows=150), [{"rowwise_e4m3": known}, {"rowwise_e4m3": alike}]).unsupported


def test_a_part_that_the_plan_has_not_is_refused(model, report):
    with pytest.raises(UnknownName, match="'', 'click', 'buy', 'click, high', 'buy, high'"):
        joint_effect(model, loka.plan(report, Budget(ne=1.0)), [], part="hig")


def test_missing_rows_follow_from_the_width():
    assert Part(rows=200, width=1.9).missing == 0
    assert Part(rows=200, width=4.0).missing == 600  # twice the logarithm: four times the rows
    assert Part(rows=20, width=1.1).missing == LEAST_ROWS - 20


def test_never_is_a_whole_batch_chosen():
    strata = SegmentRows(Segments(("a", "b"), lambda batch: batch, by="place"))
    assert len(strata.choose(torch.tensor([0, 1, 1, 0]), torch.arange(0), seed=0)) == 3
