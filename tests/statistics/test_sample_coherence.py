import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import loka
from loka.probe.merging import merge_stats
from loka.statistics import sample_coherence
from loka.statistics.sample_coherence import SUMS, merge_samples, pick, rows_by_sample, samples_in, samples_of


def named(samples):
    return dict(zip(SUMS, samples.sums.tolist(), strict=True))


def few_directions(samples, seed):
    """x [S, 5, 6] and g [S, 5, 4] whose M_s lie in a space of three dimensions."""
    fixed, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=fixed).expand(samples, 5, 6)
    slopes = torch.einsum(
        "sr,rnk->snk", torch.randn(samples, 3, generator=generator), torch.randn(3, 4, 6, generator=fixed)
    )
    return x, x @ slopes.transpose(1, 2)


def test_sums_are_those_of_loops_over_samples_and_rows():
    x, g = few_directions(3, 1)
    x = x + torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(2))
    found = named(samples_of(x, g, all_rows=20))
    wanted = dict.fromkeys(SUMS, 0.0)
    for sample in range(3):
        log_x, log_g = (v[sample].double().square().sum(dim=1).log2() for v in (x, g))
        wanted["all_rows"] += 20
        wanted["all_pairs"] += 20 * 19
        wanted["samples"] += 1
        wanted["rows"] += 5
        wanted["coherent"] += sum(torch.outer(g[sample, t], x[sample, t]) for t in range(5)).square().sum()
        for t in range(5):
            wanted["energy"] += x[sample, t].square().sum() * g[sample, t].square().sum()
            wanted["log_x"] += log_x[t]
            wanted["log_xg"] += log_x[t] * log_g[t]
            wanted["pairs"] += 4
        wanted["x"] += x[sample].square().sum()
        wanted["g_sum"] += g[sample].sum(dim=0).square().sum()
        wanted["log_g_sum"] += log_g.sum() ** 2
        wanted["log_xg_sum"] += log_x.sum() * log_g.sum()
    for name, value in wanted.items():
        if value:
            assert found[name] == pytest.approx(float(value), rel=1e-5), name  # float32 products


def test_sketches_merge_to_the_whole():
    """But for rounding; the factor, as samples lie in three directions, which is less than its rank."""
    x, g = few_directions(60, 3)
    whole = samples_of(x, g)
    merged = samples_of(x[:1], g[:1])
    for begin, end in ((1, 7), (7, 30), (30, 60)):
        merged = merge_samples(merged, samples_of(x[begin:end], g[begin:end]))
    torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-12, atol=0)
    products = (g.transpose(1, 2) @ x).flatten(1)
    for found in (whole, merged):
        torch.testing.assert_close(found.factor.t() @ found.factor, products.t() @ products, rtol=1e-4, atol=1e-3)
        assert found.factor.shape[0] <= 8


def test_memory_is_bounded_where_layers_are_large():
    x, g = torch.randn(40, 3, 512), torch.randn(40, 3, 512)
    assert samples_of(x, g).factor.numel() <= 1 << 20


def test_bad_rows_are_left_out_and_zero_rows_have_no_log_energy():
    x, g = few_directions(10, 4)
    x, g = x.clone(), g.clone()
    without = named(samples_of(x[:, :4], g[:, :4]))
    x[:, 4, 2] = math.nan
    found = named(samples_of(x, g))
    assert found["all_rows"] == 50
    given = {"all_rows": 0, "all_pairs": 0}
    assert {**found, **given} == pytest.approx({**without, **given})
    g[:, 3] = 0
    assert named(samples_of(x, g))["alive"] == 30
    assert named(samples_of(x, g))["rows"] == 40


def test_rows_by_sample_as_shapes_tell():
    assert rows_by_sample((8,), 8) is None
    assert rows_by_sample((8, 1), 8) is None
    assert rows_by_sample((8, 3), 8).tolist() == torch.arange(24).view(8, 3).tolist()
    assert rows_by_sample((3, 8), 8).tolist() == torch.arange(24).view(3, 8).t().tolist()  # sequence first
    assert rows_by_sample((8, 8), 8).tolist() == torch.arange(64).view(8, 8).tolist()
    assert rows_by_sample((24,), 8).tolist() == torch.arange(24).view(8, 3).tolist()  # flattened
    assert rows_by_sample((4, 5), 7).shape == (4, 5)  # of another batch: runs of rows, along the first side
    assert rows_by_sample((4, 5), 0).shape == (4, 5)
    assert rows_by_sample((7,), 3) is None
    assert rows_by_sample((0, 5), 0) is None


def test_whole_samples_are_picked_and_long_ones_in_part():
    generator, elements = torch.Generator().manual_seed(0), 6 * 4
    given = torch.randn(9, 6, 5).transpose(1, 2)  # rows [9 * 5] of a view over tokens
    picked = pick(given, 9, elements, 20, generator)
    assert picked.rows.shape == (4, 5)
    assert picked.all_rows == 5
    assert torch.equal(picked.values, given.reshape(-1, 6)[picked.rows])
    assert all(len(set((rows // 5).tolist())) == 1 for rows in picked.rows)
    long = pick(torch.randn(3, 300, 6), 3, elements, 20, generator)
    assert (long.rows.shape, long.all_rows) == ((1, 64), 300)
    assert pick(torch.randn(9, 6), 9, elements, 20, generator) is None


class Encoder(nn.Module):
    """A stranger's: tokens of varying number, pooled to one logit."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.logit = nn.Linear(16, 1)

    def forward(self, tokens):
        return self.logit(self.layer(tokens).mean(dim=1)).squeeze(1)


def probed(seed, lengths, **options):
    torch.manual_seed(0)
    model, seen, whole = Encoder(), [], []
    generator = torch.Generator().manual_seed(seed)

    def watch(linear, args, output):
        output.register_hook(lambda g: seen.append((args[0].detach(), g)))

    model.layer.linear1.register_forward_hook(watch)
    with loka.Probe(model, every=1, seed=seed, effect_samples=0, **options) as probe:
        for length in lengths:
            loss = nn.functional.softplus(model(torch.randn(24, length, 16, generator=generator)))
            loss.mean().backward()
    for x, g in seen:
        whole.append(samples_of(x, g))
    return probe.stats(), whole


def test_a_probe_learns_samples_of_varying_length_and_its_records_merge():
    stats, whole = probed(1, (7, 3, 11), rows=10_000)
    found = samples_in(stats.layers["layer.linear1"].operands["grad_output"])
    for part in whole[1:]:
        whole[0] = merge_samples(whole[0], part)
    torch.testing.assert_close(found.sums, whole[0].sums, rtol=1e-5, atol=0)
    totals = named(found)
    assert (totals["samples"], totals["all_rows"]) == (72, 24 * 21)
    assert samples_in(stats.layers["logit"].operands["grad_output"]) is None  # one row of each
    # Of two runs, in one record. The path of a layer is kept.
    other, _ = probed(2, (5, 9), rows=10_000)
    both = merge_stats([stats, other]).layers["layer.linear1"].operands["grad_output"]
    part = samples_in(other.layers["layer.linear1"].operands["grad_output"])
    merged = merge_samples(found, part)
    torch.testing.assert_close(samples_in(both).sums, merged.sums)
    gram = [samples.factor.t() @ samples.factor for samples in (samples_in(both), merged)]
    torch.testing.assert_close(*gram, rtol=1e-3, atol=1e-3 * gram[1].diagonal().max().item())
    # A record from before there were samples takes over what the other one has.
    layer = other.layers["layer.linear1"]
    grad = layer.operands["grad_output"]
    names = {sample_coherence.FACTOR, sample_coherence.TOTALS}
    old = replace(grad, tensors={n: t for n, t in grad.tensors.items() if n not in names})
    layer = replace(layer, operands={**layer.operands, "grad_output": old})
    older = replace(other, layers={**other.layers, "layer.linear1": layer})
    for several in ([stats, older], [older, stats]):
        kept = samples_in(merge_stats(several).layers["layer.linear1"].operands["grad_output"])
        assert torch.equal(kept.sums, found.sums)


def test_a_sample_of_samples_tells_of_all(tmp_path):
    """Pairs of rows are as coherent in a part of the samples, and in a part of their rows."""
    lengths = (80,) * 6
    stats, whole = probed(1, lengths, rows=512)
    assert named(samples_in(stats.layers["layer.linear1"].operands["grad_output"]))["samples"] == 6 * 8
    stats.save(tmp_path)
    kept = samples_in(loka.Stats.load(tmp_path).layers["layer.linear1"].operands["grad_output"])
    for part in whole[1:]:
        whole[0] = merge_samples(whole[0], part)
    means = [
        (s["coherent"] - s["energy"]) / s["pairs"] / (s["energy"] / s["rows"]) for s in map(named, (kept, whole[0]))
    ]
    assert means[0] == pytest.approx(means[1], rel=0.25)  # of 48 samples of 144: a tenth or so
    assert means[1] > 0.02


def test_an_interrupted_run_and_its_rest_learn_the_same_bits():
    torch.manual_seed(0)
    model, batches = Encoder(), [torch.randn(9, length, 16) for length in (4, 6, 5, 70)]

    def run(part, resume=None):
        with loka.Probe(model, every=1, rows=20, effect_samples=0, resume=resume) as probe:
            for tokens in part:
                model.zero_grad()
                model(tokens).sum().backward()
        return probe.stats()

    assert run(batches[2:], run(batches[:2])).digest() == run(batches).digest()
