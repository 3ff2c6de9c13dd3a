import pytest
import torch
from torch.nn import functional

import loka
from loka.measurement import Settings
from loka.zoo import build
from loka.zoo.attention import rotate
from loka.zoo.history import HistoryTable
from loka.zoo.sequences.kunlun import GDPA, SumKron, WindowAttention, WukongExperts

# float64, so that a wrong formula stands clear of rounding.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_sum_kron_is_a_sum_of_kronecker_products():
    compress = SumKron(5, 3, 4, rank=2).double()
    z = tokens(7, 5, 4)
    whole = sum(torch.kron(a.T, w.T) for a, w in zip(compress.tokens, compress.features, strict=True))
    expected = (z.flatten(1) @ whole.T).unflatten(1, (3, 4))
    torch.testing.assert_close(compress(z), expected, **CLOSE)
    assert sum(p.numel() for p in compress.parameters()) == 2 * (5 * 3 + 4 * 4)


def test_gdpa_is_a_pffn_whose_map_each_row_makes():
    """Per row and head a two-layer MLP without biases, V^T act(K s / tau), whose weights X_sum gives."""
    gdpa = GDPA(8, heads=2, longest=3, activation="gelu").double()
    s, x_sum = tokens(3, 5, 8), tokens(3, 2, 8)
    k, v = gdpa.kv(x_sum).split(8, dim=2)
    for row in range(3):
        for head in (slice(0, 4), slice(4, 8)):
            inner = functional.gelu(functional.linear(s[row, :, head], k[row, :, head]) / 3)
            expected = s[row, :, head] + functional.linear(inner, v[row, :, head].T)
            torch.testing.assert_close(gdpa(s, x_sum)[row, :, head], expected, **CLOSE)


@pytest.mark.parametrize("window", [0, 2, 9])
def test_the_window_is_attention_to_what_is_near(window):
    layer = WindowAttention(8, heads=1, window=window).double()
    s, seen = tokens(2, 6, 8), torch.arange(6) < torch.tensor([[6], [4]])
    q, k, v = layer.attention.qkv(s).split(8, dim=2)
    q, k, found = rotate(q), rotate(k), torch.empty_like(s)
    for row in range(2):
        for i in range(6):
            near = [j for j in range(6) if j == i or (abs(i - j) <= window and seen[row, j])]
            found[row, i] = (q[row, i] @ k[row, near].T / 8**0.5).softmax(0) @ v[row, near]
    expected = functional.layer_norm(s + layer.attention.out(found), (8,))
    torch.testing.assert_close(layer(s, seen), expected, **CLOSE)
    torch.testing.assert_close(layer(s[:1], None), expected[:1], **CLOSE)


def test_experts_are_factorization_machines_over_their_own_tokens():
    experts = WukongExperts(4, experts=2, tokens=6, rank=2, hidden=5, activation="silu").double()
    x = tokens(3, 6, 4)
    for row in range(3):
        for m, own in enumerate(x[row].split(3)):
            pairs = functional.layer_norm((own @ own.T @ experts.project[m]).flatten(), (6,))
            fed = functional.silu(pairs @ experts.up[m]) @ experts.down[m]
            expected = functional.layer_norm(own + fed.reshape(3, 4), (4,))
            torch.testing.assert_close(experts(x)[row, 3 * m : 3 * m + 3], expected, **CLOSE)
    with pytest.raises(ValueError, match="4 experts need a count of tokens that they divide, not 6"):
        WukongExperts(4, experts=4, tokens=6, rank=2, hidden=5, activation="silu")


def small(count):
    """The small size and rows for it, some of them without an event."""
    torch.manual_seed(0)
    sparse = torch.stack([torch.randint(size, (count,)) for size in (4, 7, 9)], dim=1)
    inputs = torch.randn(count, 5), sparse, torch.randint(1, 9, (count, 6)), torch.arange(count) % 7
    return build("kunlun", dense_features=5, vocab_sizes=(4, 7, 9), history=HistoryTable(column=2)), inputs


def test_layers_take_turns():
    """Even layers pool and personalize, odd ones see a window; after the last pooling S stays."""
    model, (dense, sparse, sequence, lengths) = small(9)
    assert (len(model.seeds), len(model.personal), len(model.windows)) == (2, 1, 1)
    events, seen = model.front.events(sequence, lengths)
    x, s = model.front(dense, sparse), model.enter(events)
    h = model.compress[0](model.seeds[0](s, seen))
    s = model.windows[0](model.personal[0](s, model.summaries[0](x)), seen)
    pooled = [h, h, model.compress[1](model.seeds[1](s, seen))]
    for summary, experts, h in zip(model.summaries, model.experts, pooled, strict=True):
        x = experts(torch.cat([summary(x), h], dim=1))
    expected = model.logit(model.top(x.flatten(1))).squeeze(1)
    torch.testing.assert_close(model(dense, sparse, sequence, lengths), expected)


@pytest.mark.slow
def test_stacked_weights_run_in_fp8():
    """Experts and both halves of the compression are sites that a plan puts in FP8, and run there."""
    model, inputs = small(64)
    with loka.Probe(model, every=1) as probe:
        model(*inputs).square().mean().backward()
    report = loka.measure(
        probe.stats(),
        device="cpu",
        candidates=["hp", "emulated:rowwise_e4m3"],
        settings=Settings(min_draws=2, max_draws=2),
    )
    plan = loka.plan(report, loka.Budget(min_sqnr_db=15))
    with torch.no_grad():
        before = model(*inputs)
    loka.convert(model, plan)
    after = model(*inputs)
    after.square().mean().backward()
    runs = {site for site, counts in loka.health_of(model).items() if counts["runs"]}
    stacks = [f"experts.0.{name}[{m}]" for name in ("project", "up", "down") for m in (0, 1)]
    for stack in (*stacks, "compress.0.tokens", "compress.0.features", "personal.0.kv"):
        assert f"{stack}/output" in runs, stack
    assert "logit/output" not in runs
    assert 0 < (after - before).norm() < 0.2 * before.norm()
