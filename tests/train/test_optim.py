import math

import pytest
import torch
from gpu import nothing_synchronizes
from torch import nn

from loka.train import RowwiseAdagrad, TrainConfig, build_optimizers, optim

ROWS, WIDTH, LR, EPS = 12, 6, 0.1, 1e-8


def batches(steps=5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(ROWS // 2, (9,), generator=generator)  # 9 of 6 rows: duplicates for sure
        yield ids, torch.randn(9, WIDTH, generator=generator)


def trained(*, sparse):
    torch.manual_seed(1)
    table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
    optimizer = RowwiseAdagrad(table.parameters(), lr=LR, eps=EPS)
    for ids, factor in batches():
        optimizer.zero_grad()
        (table(ids) * factor).sum().backward()
        optimizer.step()
    return table.weight.detach(), optimizer


def naive():
    torch.manual_seed(1)
    weight = nn.Embedding(ROWS, WIDTH).weight.detach().double().tolist()
    accumulated = [0.0] * ROWS
    for ids, factor in batches():
        gradient = [[0.0] * WIDTH for _ in range(ROWS)]
        for row, values in zip(ids.tolist(), factor.tolist(), strict=True):
            gradient[row] = [old + new for old, new in zip(gradient[row], values, strict=True)]
        for row in set(ids.tolist()):
            accumulated[row] += sum(value**2 for value in gradient[row]) / WIDTH
            rate = LR / (math.sqrt(accumulated[row]) + EPS)
            weight[row] = [w - rate * g for w, g in zip(weight[row], gradient[row], strict=True)]
    return torch.tensor(weight), torch.tensor(accumulated)


@pytest.mark.parametrize(("sparse", "summed"), [(True, "_coalesced"), (True, "_summed_by_row"), (False, "")])
def test_update_equals_a_naive_loop(sparse, summed, monkeypatch):
    monkeypatch.setattr(optim, "_coalesced", getattr(optim, summed, None))  # a GPU's way on a CPU too
    weight, optimizer = trained(sparse=sparse)
    expected_weight, expected_sum = naive()
    (state,) = optimizer.state.values()
    # float32 against float64 over five updates of size 0.1: a few roundings of 6e-8 each.
    torch.testing.assert_close(weight, expected_weight, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(state["sum"], expected_sum, rtol=2e-6, atol=0)


def test_sparse_equals_dense_and_leaves_other_rows_alone():
    sparse, _ = trained(sparse=True)
    dense, _ = trained(sparse=False)
    torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-6)  # the order of a sum of six
    torch.manual_seed(1)
    start = nn.Embedding(ROWS, WIDTH).weight.detach()
    assert torch.equal(sparse[ROWS // 2 :], start[ROWS // 2 :])
    assert not torch.equal(sparse[: ROWS // 2], start[: ROWS // 2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("values", "rows"), [(1, 3), (40, 5), (300, 1000), (0, 5)])
def test_sums_by_row_are_those_of_coalesce_and_wait_for_nothing(values, rows, device):
    torch.manual_seed(0)
    ids, by_value = torch.randint(rows, (1, values)), torch.randn(values, WIDTH)
    by_value[5:6] = math.nan
    gradient = torch.sparse_coo_tensor(ids, by_value, (rows, WIDTH), check_invariants=True).to(device)
    with nothing_synchronizes():
        found, sums = optim._summed_by_row(gradient)
    expected = gradient.coalesce()
    count = expected._nnz()
    assert torch.equal(found[:count], expected.indices()[0])
    # Both add up to 60 float32 numbers of size 1 in some order.
    torch.testing.assert_close(sums[:count], expected.values(), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[count:].eq(found[count - 1 :][:1]).all()
    assert not sums[count:].any()


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([2, 2, 4, 4])).sum().backward()
    table.weight.grad._values()[2:] = math.inf
    RowwiseAdagrad(table.parameters()).step()
    changed = (table.weight.detach() != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [2, 4]
    assert table.weight[[row for row in range(ROWS) if row != 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_exactly(dtype):
    def run(*, restart):
        torch.manual_seed(1)
        table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        optimizer = RowwiseAdagrad(table.parameters())
        for index, (ids, factor) in enumerate(batches()):
            if restart and index == 3:
                state = optimizer.state_dict()
                optimizer = RowwiseAdagrad(table.parameters())
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (table(ids) * factor.to(dtype)).sum().backward()
            optimizer.step()
        return table.weight.detach(), optimizer.state[table.weight]["sum"]

    for restarted, straight in zip(run(restart=True), run(restart=False), strict=True):
        assert restarted.dtype == straight.dtype
        assert torch.equal(restarted, straight)
    assert run(restart=True)[1].dtype == torch.float32


def test_only_sparse_tables_get_adagrad():
    model = nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(5, 4, sparse=True),
            "sparse": nn.Embedding(5, 4, sparse=True),
            "dense": nn.Embedding(5, 4),
            "fc": nn.Linear(4, 1),
        }
    )
    optimizers = build_optimizers(model, TrainConfig(batch_size=1, lr=0.5, sparse_lr=0.25))

    def weights(name):
        return [id(weight) for group in optimizers[name].param_groups for weight in group["params"]]

    assert isinstance(optimizers["sparse"], RowwiseAdagrad)
    assert isinstance(optimizers["dense"], torch.optim.Adam)
    assert weights("sparse") == [id(model["bag"].weight), id(model["sparse"].weight)]
    assert weights("dense") == [id(model["dense"].weight), *map(id, model["fc"].parameters())]
    assert optimizers["dense"].param_groups[0]["lr"] == 0.5
    assert optimizers["sparse"].param_groups[0]["lr"] == 0.25
    assert list(build_optimizers(nn.Linear(1, 1), TrainConfig(batch_size=1))) == ["dense"]


def test_a_table_has_two_dimensions():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        RowwiseAdagrad([nn.Parameter(torch.zeros(3))])
