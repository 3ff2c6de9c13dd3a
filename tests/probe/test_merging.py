from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models import stats_of
from ranks import on_ranks
from torch import nn

import loka
from loka.core.exceptions import PlanMismatch
from loka.core.numerics.effect import OTHER_PARTS, Effect
from loka.core.records.parts import Part
from loka.core.records.stats import Stats
from loka.core.records.stats_bytes import from_bytes, to_bytes
from loka.probe.merging import gather_stats, merge_stats
from loka.statistics import tails
from loka.statistics.effect_casts import CASTS, LEARNING

WORLD, STEPS, ROWS = 4, 6, 48
EPS = torch.finfo(torch.float32).eps
FULL = 64  # features up to which covariances are whole: of 40 features are, of 96 are not


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 1))


def quarters(step):
    """A batch [WORLD * ROWS, 40] of correlated, heavy-tailed features with zeros, by rank."""
    generator = torch.Generator().manual_seed(step)
    mixed = torch.randn(WORLD * ROWS, 12, generator=generator) @ torch.randn(12, 40, generator=generator)
    heavy = (0.7 * torch.randn(WORLD * ROWS, 40, generator=generator)).exp()
    zeros = torch.rand(WORLD * ROWS, 40, generator=generator) < 0.2
    return list((1 + mixed * heavy).masked_fill(zeros, 0).split(ROWS))


def train(probed, net, parts, save_to=None):
    """A few steps of SGD on the mean over the parts; each part is a call. DDP averages by itself."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with loka.Probe(
        probed, every=1, rows=10_000, depth_rows=10_000, full_covariance=FULL, rank=32, save_to=save_to
    ) as probe:
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = parts(step)
            for part in batch:
                (nn.functional.softplus(-probed(part)).mean() / len(batch)).backward()
            optimizer.step()
    return probe.stats()


def one_rank(rank, folder):
    net = model()
    ddp = nn.parallel.DistributedDataParallel(net)
    # A rank's loss is the mean over its rows, so its gradients are WORLD times those of the whole batch's.
    own = train(ddp, net, lambda step: [quarters(step)[rank]], folder / "stats")
    return {"own": to_bytes(own), "merged": to_bytes(gather_stats(own))}


def misfit(rank, folder):
    mine = nn.Sequential(nn.Linear(4, 8 if rank == 2 else 16), nn.Linear(8 if rank == 2 else 16, 1))
    stats = stats_of(mine, torch.randn(6, 4), torch.sum, full_covariance=3 if rank == 1 else 512)
    try:
        gather_stats(stats)
    except PlanMismatch as error:
        dist.barrier()  # nobody hangs, nobody left early
        return {"told": str(error)}
    return {"told": None}


def in_a_group_of_three(rank, folder):
    group = dist.new_group([1, 2, 3])
    stats = learnt(rank)
    if rank == 0:
        with pytest.raises(ValueError, match="not in the group"):
            gather_stats(stats, group=group)
        return {"merged": b""}
    return {"merged": to_bytes(gather_stats(stats, group=group))}


def learnt(seed, **options):
    with torch.random.fork_rng():
        torch.manual_seed(100 + seed)
        net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    with loka.Probe(net, every=1, seed=seed, **options) as probe, torch.random.fork_rng():
        torch.manual_seed(100 + seed)
        for _ in range(2):
            net(torch.randn(20, 5)).sum().backward()
    return probe.stats()


def with_layer(stats, path, **changes):
    return replace(stats, layers={**stats.layers, path: replace(stats.layers[path], **changes)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    return on_ranks(one_rank, WORLD, folder)


@pytest.fixture(scope="module")
def alone():
    net = model()
    return train(net, net, quarters)


@pytest.fixture(scope="module")
def merged(ranks):
    return from_bytes(ranks[0]["merged"])


def test_every_rank_gets_the_same_bytes(ranks):
    assert len({rank["merged"] for rank in ranks}) == 1
    assert len({rank["own"] for rank in ranks}) == WORLD
    by_hand = merge_stats([from_bytes(rank["own"]) for rank in ranks])
    merged = from_bytes(ranks[0]["merged"])
    assert list(by_hand.layers) == list(merged.layers) == ["0", "2", "4"]


def test_every_rank_saves_to_a_folder_of_its_own(ranks, folder):
    """All were told the same one."""
    saved = sorted((folder / "stats").iterdir())
    assert [path.name for path in saved] == ["rank-0", "rank-1", "rank-2", "rank-3"]
    for path, rank in zip(saved, ranks, strict=True):
        assert Stats.load(path).digest() == from_bytes(rank["own"]).digest()


def test_counts(merged, alone):
    assert (merged.steps, merged.sampled_steps) == (alone.steps, alone.sampled_steps) == (24, 24)
    for path, layer in alone.layers.items():
        found = merged.layers[path]
        assert (found.rows, found.calls, found.order) == (layer.rows, layer.calls, layer.order)
        assert (found.rows, found.calls) == (ROWS, WORLD * STEPS)
        assert found.needs_input_grad == layer.needs_input_grad
        for operand, distribution in layer.operands.items():
            same = ("count", "nonfinite_rows") + (("zeros",) if path == "0" and operand == "input" else ())
            for name in same:
                if name in distribution.numbers:
                    assert found.operands[operand].numbers[name] == distribution.numbers[name]


# Both sum n = 1152 rows in float32. A sum of n products is off by at most n eps times the sum of their
# magnitudes (Higham, Accuracy and Stability, 3.1), which for a covariance is at most sqrt(S_jj S_kk) by
# Cauchy-Schwarz. In the second layer and later the rows themselves differ: the ranks' gradients are summed
# in another order, by a few eps of each step's change of the weights, far below n eps.
N_EPS = WORLD * STEPS * ROWS * EPS


def scaled(distribution, operand, path):
    """A rank's loss is the mean over its own rows: its gradients are WORLD times those of one process."""
    if operand != "grad_output":
        return distribution
    by = {"mean": WORLD, "square": WORLD**2, "scatter": WORLD**2, "factor": WORLD, "amax": WORLD}
    tensors = {n: t * by.get(n, 1) for n, t in distribution.tensors.items()}
    return replace(distribution, tensors=tensors)


@pytest.mark.parametrize(
    ("path", "operand"), [("0", "input"), ("4", "input"), ("2", "grad_output"), ("4", "grad_output")]
)
def test_whole_covariances_are_those_of_one_process(merged, alone, path, operand):
    one = scaled(alone.layers[path].operands[operand], operand, path).tensors
    both = merged.layers[path].operands[operand].tensors
    spread = one["square"].sqrt()
    count = alone.layers[path].operands[operand].numbers["count"]
    assert ((both["scatter"] - one["scatter"]).abs() <= N_EPS * torch.outer(spread, spread)).all()
    assert ((both["square"] - one["square"]).abs() <= N_EPS * one["square"]).all()
    level = (one["mean"].square() + one["square"] / count).sqrt()  # the root mean square
    assert ((both["mean"] - one["mean"]).abs() <= N_EPS * level).all()


@pytest.mark.parametrize(("path", "operand"), [("2", "input"), ("0", "grad_output")])
def test_low_rank_covariances_lose_no_more_than_was_dropped(merged, alone, path, operand):
    """0 <= scatter - F^T F, so two of them differ by at most the larger dropped trace, in any direction."""
    one = scaled(alone.layers[path].operands[operand], operand, path).tensors
    both = merged.layers[path].operands[operand].tensors
    assert both["factor"].shape[0] <= max(64, one["factor"].shape[0])
    assert ((both["square"] - one["square"]).abs() <= N_EPS * one["square"]).all()
    dropped = max((t["square"].sum() - t["factor"].square().sum()).item() for t in (one, both))
    whole = one["square"].sum().item()
    apart = torch.linalg.matrix_norm(both["factor"].t() @ both["factor"] - one["factor"].t() @ one["factor"], 2)
    assert apart <= dropped + N_EPS * whole
    assert dropped < 0.3 * whole  # or the comparison would say nothing


def test_amax_is_that_of_the_parts(merged, ranks):
    own = [from_bytes(rank["own"]).layers["0"].operands["input"].tensors["amax"] for rank in ranks]
    whole = torch.stack([torch.cat(quarters(step)).abs().max() for step in range(STEPS)])
    assert torch.equal(merged.layers["0"].operands["input"].tensors["amax"], whole)
    assert any(not torch.equal(part, whole) for part in own)


def test_depth_histograms_add_up(merged, alone):
    """Of the data, bit for bit: counts, and float64 sums of squares that differ in their order only. Each
    rank scales by its own amax, and so does each call of the one process."""
    one, both = (stats.layers["0"].operands["input"].tensors for stats in (alone, merged))
    names = [name for name in one if name.startswith("depth_")]
    assert names
    for name in names:
        torch.testing.assert_close(both[name], one[name], rtol=1e-12, atol=0)
    for path in ("2", "4"):
        for operand in ("input", "weight", "grad_output"):
            one, both = (stats.layers[path].operands[operand].tensors for stats in (alone, merged))
            for name in [name for name in one if name.startswith("depth_")]:
                # A rounding of the weights moves a few elements to the next bin, and none out of the sum.
                torch.testing.assert_close(both[name].sum(dim=0)[0], one[name].sum(dim=0)[0], rtol=0, atol=0)
                moved = (both[name] - one[name])[:, 0].abs().sum() / one[name][:, 0].sum()
                assert moved < 1e-3


def test_weights_are_those_that_every_rank_holds(merged, ranks):
    """One matrix normal: data-parallel ranks saw the same snapshots, and merging keeps them, bit for bit."""
    for rank in ranks:
        for path, layer in from_bytes(rank["own"]).layers.items():
            kept, own = merged.layers[path].operands["weight"], layer.operands["weight"]
            assert kept.numbers == own.numbers == {"snapshots": STEPS}
            for name in ("mean", "rows", "columns"):
                assert torch.equal(kept.tensors[name], own.tensors[name])


def test_one_process_with_whole_batches_learns_the_same_weights(merged):
    """Its weights took the same steps but for rounding: `mean` is off by a few eps of the weights."""
    net = model()
    whole = train(net, net, lambda step: [torch.cat(quarters(step))])
    for path, layer in whole.layers.items():
        mean, other = (s.operands["weight"].tensors["mean"] for s in (layer, merged.layers[path]))
        assert ((mean - other).abs() <= 8 * EPS * mean.abs().max()).all()
        assert merged.layers[path].operands["weight"].numbers == layer.operands["weight"].numbers


def test_effects_add_up(merged, alone, ranks):
    """Sums over the ranks' samples; the one process picked other rows of the same data."""
    own = [from_bytes(rank["own"]) for rank in ranks]
    for path, layer in merged.layers.items():
        assert layer.effects.keys() >= CASTS.keys() - LEARNING
        assert (layer.effects.keys() == CASTS.keys()) == (not layer.no_effect)
        for name, effect in layer.effects.items():
            parts = [stats.layers[path].effects[name] for stats in own]
            assert effect.count == sum(part.count for part in parts) > 1000
            assert effect.total == pytest.approx(sum(part.total for part in parts), rel=1e-12)
            both, one = effect.kl(), alone.layers[path].effects[name].kl()
            assert both.low <= one.value * 1.0001 <= both.high * 1.0001
        tables = [name for name in layer.operands["input"].tensors if name.startswith("effect_depth_")]
        assert tables
        for name in tables:
            total = sum(stats.layers[path].operands["input"].tensors[name] for stats in own)
            torch.testing.assert_close(layer.operands["input"].tensors[name], total, rtol=1e-12, atol=0)


def test_a_rank_that_does_not_fit_stops_all_of_them(tmp_path):
    found = on_ranks(misfit, WORLD, tmp_path)
    told = found[0]["told"]
    assert all(rank["told"] == told for rank in found), "every rank sees the whole list"
    assert "rank 2: model: 0 is 4 -> 8, bias in this model, 4 -> 16, bias there" in told
    assert "rank 1: 0 keeps the covariance of input as low rank, in full in rank 0" in told
    assert "rank 3" not in told
    assert "Way out" in told


def test_groups_of_an_odd_number(tmp_path):
    found = on_ranks(in_a_group_of_three, WORLD, tmp_path)
    assert found[1]["merged"] == found[2]["merged"] == found[3]["merged"]
    stats = from_bytes(found[1]["merged"])
    assert stats.layers["0"].operands["input"].numbers["count"] == 3 * 2 * 20


def test_alone_nothing_is_gathered():
    stats = learnt(0)
    assert gather_stats(stats) is stats


def test_statistics_of_other_models_are_refused():
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    stats = stats_of(net, torch.randn(4, 5), torch.sum)
    with pytest.raises(PlanMismatch) as refused:
        merge_stats([learnt(0), stats, learnt(1, full_covariance=2)])
    told = str(refused.value)
    assert "statistics 2: model: 0 is 5 -> 4, bias in this model, 5 -> 3, bias there" in told
    assert "statistics 2: model: 1 is 4 -> 1, bias in this model, 3 -> 1, bias there" in told
    assert "statistics 3: 0 keeps the covariance of input as low rank, in full in statistics 1" in told


def test_what_this_version_does_not_know_is_refused():
    """Leaving it out in silence would make statistics of a part."""
    stats = learnt(0)
    operands = stats.layers["0"].operands
    newer = replace(operands["input"], tensors={**operands["input"].tensors, "skew": torch.zeros(5)})
    with pytest.raises(PlanMismatch, match="unknown here: skew"):
        merge_stats([stats, with_layer(stats, "0", operands={**operands, "input": newer})])


def test_nothing_and_one():
    with pytest.raises(ValueError, match="no statistics"):
        merge_stats([])
    stats = learnt(0)
    assert merge_stats([stats]) is stats


def test_the_same_record_twice_is_refused():
    """Its samples would count twice, and intervals shrink by sqrt 2 for nothing."""
    one, other = learnt(0), learnt(1)
    with pytest.raises(PlanMismatch, match="statistics 3 are statistics 1 once more"):
        merge_stats([one, other, replace(one)])
    empty = replace(one, sampled_steps=0, layers={})
    assert merge_stats([empty, replace(empty)]).steps == 2 * one.steps


def test_the_order_does_not_matter():
    """Up to the last rounding; but for the weight, of which one is kept."""
    several = [learnt(seed) for seed in range(3)]
    one, other = merge_stats(several), merge_stats([several[at] for at in (2, 0, 1)])
    for path, layer in one.layers.items():
        for operand in ("input", "grad_output"):
            for name, tensor in layer.operands[operand].tensors.items():
                torch.testing.assert_close(other.layers[path].operands[operand].tensors[name], tensor)


def test_sketches_of_tails_add_up():
    """A record that has them beside the Gaussian (statistics/tails.py) keeps them: they are sums."""
    x = torch.randn(60, 5).exp()

    def with_sketches(rows):
        stats, sketch, cross = learnt(0), tails.tails_of(rows), tails.cross_of(rows, rows[:, :3])
        operands = stats.layers["0"].operands
        return with_layer(stats, "0", operands={n: tails.with_tails(d, sketch, cross) for n, d in operands.items()})

    merged = merge_stats([with_sketches(x[:20]), with_sketches(x[20:])])
    both = merged.layers["0"].operands["input"]
    whole = tails.tails_of(x)
    assert torch.equal(both.tensors[tails.COLUMNS], whole.columns)
    assert torch.equal(both.tensors[tails.ROWS], whole.rows)
    cross = tails.cross_in(both)
    assert cross.count == 60
    torch.testing.assert_close(cross.sum, x[:, :3].t() @ x)


def test_layers_that_only_some_saw():
    one, other = learnt(0), learnt(1)
    lacking = replace(one, layers={"0": one.layers["0"]}, skipped={"1": "never called"})
    both = merge_stats([lacking, other])
    assert list(both.layers) == ["0", "1"]
    assert not both.skipped
    assert both.layers["1"].calls == other.layers["1"].calls


def test_an_effect_that_one_of_them_lacks():
    one, other = learnt(0), learnt(1)
    assert one.layers["1"].effects
    without = with_layer(one, "1", effects={}, no_effect="its rows mix samples")
    found = merge_stats([without, other]).layers["1"]
    assert found.effects == {n: e for n, e in other.layers["1"].effects.items() if "centred" not in n}
    assert found.no_effect == OTHER_PARTS
    neither = with_layer(other, "1", effects={})
    assert merge_stats([neither, without]).layers["1"].no_effect == "its rows mix samples"
    stale = with_layer(other, "1", no_effect="old")
    assert merge_stats([one, stale]).layers["1"].no_effect == f"{OTHER_PARTS}; old"
    assert merge_stats([merge_stats([one, stale]), learnt(2)]).layers["1"].no_effect == f"{OTHER_PARTS}; old"
    two_tasks = Effect(count=1, spread=1, total=1, squares=1, probabilities=(0.5, 0.5))
    with pytest.raises(PlanMismatch, match="1 has effects on 2 tasks, 1 tasks in statistics 1"):
        merge_stats([one, with_layer(other, "1", effects={"rowwise_e4m3": two_tasks})])
    named = [
        replace(with_layer(stats, "1", effects={"rowwise_e4m3": two_tasks}), parts={t: Part(task=t) for t in tasks})
        for stats, tasks in ((one, ("ctr", "cvr")), (other, ("cvr", "ctr")))
    ]
    with pytest.raises(PlanMismatch, match="tasks called cvr, ctr, ctr, cvr in statistics 1"):
        merge_stats(named)  # H would be that of the rates' means over unlike tasks


def test_layers_keep_the_earliest_place_that_a_rank_saw():
    """A rank on which a layer ran first, before others, says where it stands."""
    first = learnt(0)
    layers = {path: replace(layer, order=layer.order + 5) for path, layer in first.layers.items()}
    later = replace(first, layers=layers)
    for parts in ([first, later], [later, first]):
        found = merge_stats(parts)
        assert {path: layer.order for path, layer in found.layers.items()} == {
            path: layer.order for path, layer in first.layers.items()
        }


def test_a_weight_is_of_the_longest_part_and_a_rate_of_parts_that_agree():
    one, other = learnt(0), learnt(1)
    operands = one.layers["1"].operands
    weight = replace(operands["weight"], numbers={"snapshots": 9})
    longer = with_layer(replace(one, final_rate=0.1), "1", operands={**operands, "weight": weight})
    for parts in ([longer, other], [other, longer]):
        found = merge_stats(parts)
        assert torch.equal(found.layers["1"].operands["weight"].tensors["mean"], weight.tensors["mean"])
        assert found.final_rate is None
