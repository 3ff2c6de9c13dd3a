import itertools

import pytest
import torch
from torch.nn import functional

from loka.zoo.history import HistoryTable
from loka.zoo.layers import Front
from loka.zoo.sequences.hstu import HSTU, DistanceBias, HSTULayer, TimeBias, sight

# float64, so that a wrong formula stands clear of rounding.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
VOCAB = (4, 7, 9)


def layer(*, concat=False, time_buckets=0):
    torch.manual_seed(0)
    return HSTULayer(6, heads=2, value_dim=4, key_dim=3, reach=10, time_buckets=time_buckets, concat=concat).double()


def model(history, *, time_buckets=0, dense_features=0):
    torch.manual_seed(0)
    front = Front(dense_features=dense_features, vocab_sizes=VOCAB, dim=6, bottom=(8,), history=history)
    return HSTU(
        front,
        width=8,
        layers=2,
        heads=2,
        value_dim=4,
        key_dim=4,
        top=(8,),
        reach=10,
        time_buckets=time_buckets,
        activation="silu",
    ).double()


@pytest.mark.parametrize("concat", [False, True])
def test_a_layer_equals_equations_1_to_3(concat):
    """Token by token and head by head."""
    hstu = layer(concat=concat)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    sees = sight(torch.tensor([1, 3]), context=1, events=3)
    found = hstu(x, sees)
    for row in range(2):
        mapped = functional.silu(hstu.uvqk(hstu.input_norm(x[row])))
        u, v, q, k = mapped[:, :8], mapped[:, 8:16], mapped[:, 16:22], mapped[:, 22:28]
        for i in range(5):
            read = []
            for head in range(2):
                keys = [j for j in range(5) if sees[row, i, j]]
                total = torch.zeros(4, dtype=torch.float64)
                for j in keys:
                    dot = q[i, 3 * head : 3 * head + 3] @ k[j, 3 * head : 3 * head + 3] / 3**0.5
                    weight = functional.silu(dot + hstu.distance.weight[10 + j - i])
                    total += weight * v[j, 4 * head : 4 * head + 4] / len(keys)
                read.append(total)
            gated = hstu.norm(torch.cat(read)) * u[i]
            if concat:
                gated = torch.cat([u[i], x[row, i], gated])
            torch.testing.assert_close(found[row, i], hstu.out(gated) + x[row, i], **CLOSE)


def test_who_sees_whom():
    """Two tokens of context, three slots for events of which two are taken, and the target after them."""
    expected = [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],  # the target
        [1, 1, 1, 1, 1, 1],  # never read; it sees itself, so that nothing divides by zero
    ]
    assert sight(torch.tensor([2]), context=2, events=3)[0].int().tolist() == expected


def test_no_token_sees_the_future():
    stack = [layer(), layer()]
    x = torch.randn(1, 7, 6, dtype=torch.float64, requires_grad=True)
    sees = sight(torch.tensor([4]), context=2, events=4)
    y = x
    for hstu in stack:
        y = hstu(y, sees)
    for i in range(7):
        (gradient,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        read = gradient[0].abs().amax(dim=1) > 0
        # Context tokens see both of them, others all up to themselves.
        assert read.tolist() == [j <= max(i, 1) for j in range(7)]


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 9])
def test_distances_beyond_reach_share_a_weight(tokens):
    bias = DistanceBias(3)
    expected = [[bias.weight[3 + max(-3, min(3, j - i))] for j in range(tokens)] for i in range(tokens)]
    assert torch.equal(bias(tokens), torch.stack([torch.stack(row) for row in expected]))


def test_times_are_bucketed_by_powers_of_two():
    bias = TimeBias(4)
    found = bias(torch.tensor([[100, 100, 101, 102, 103, 104, 108, 900]]))[0]
    bucket = [0, 0, 0, 1, 1, 2, 3, 3]  # of the seconds 0, 0, 1, 2, 3, 4, 8, 800
    assert torch.equal(found[0], bias.weight[bucket])
    assert torch.equal(found, found.T)


def test_the_target_column_is_the_target():
    """Its embedding enters with the target's vector at the end, and not as context."""
    hstu = model(HistoryTable(column=1))
    entered = []
    hstu.enter.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    sparse, sequence = torch.tensor([[1, 5, 2]]), torch.tensor([[3, 6, 0]])
    hstu(torch.empty(1, 0), sparse, sequence, torch.tensor([2]))
    table = hstu.front.embeddings.table.weight
    item = table[4:11]
    expected = [table[1], table[11 + 2], item[3] + hstu.acted, item[6] + hstu.acted, item[5] + hstu.target]
    torch.testing.assert_close(entered[0][0, :5], torch.stack(expected), **CLOSE)


def test_context_has_no_order_but_for_the_distance_bias():
    """Rows without a history: the features are a set, read by the target."""
    hstu = model(None)
    with torch.no_grad():
        for bias in (block.distance.weight for block in hstu.layers):
            bias.zero_()
    tokens = torch.randn(1, 3, 6, dtype=torch.float64)
    logits = []
    for order in itertools.permutations(range(3)):
        hstu.front.forward = lambda dense, sparse, order=order: tokens[:, order]
        logits.append(hstu(torch.empty(1, 0), torch.zeros(1, 3, dtype=torch.int64)))
    torch.testing.assert_close(torch.cat(logits), logits[0].expand(6), **CLOSE)


def test_the_model_reads_times():
    hstu = model(HistoryTable(column=1), time_buckets=8)
    inputs = torch.empty(2, 0), torch.ones(2, 3, dtype=torch.int64)
    sequence, lengths = torch.ones(2, 3, dtype=torch.int64), torch.tensor([2, 2])
    times = torch.tensor([[10, 20, 0, 30], [10, 20, 0, 30]])
    before = hstu(*inputs, sequence, lengths, times)
    before.sum().backward()
    assert all(block.time.weight.grad.abs().max() > 0 for block in hstu.layers)
    times[1] = torch.tensor([10, 20, 999, 30])  # of padding
    assert torch.equal(hstu(*inputs, sequence, lengths, times), before)
    times[1] = torch.tensor([10, 29, 0, 30])
    moved = hstu(*inputs, sequence, lengths, times) - before
    assert moved[0] == 0
    assert moved[1].abs() > 1e-9
    with pytest.raises(ValueError, match="with time_buckets"):
        hstu(*inputs, sequence, lengths)
    with pytest.raises(ValueError, match="with time_buckets"):
        model(HistoryTable(column=1))(*inputs, sequence, lengths, times)
    with pytest.raises(ValueError, match="need a history"):
        model(None, time_buckets=8)
