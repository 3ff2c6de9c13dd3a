import math

import pytest
import torch
from torch import nn

from loka.train import RowwiseAdagrad, TrainConfig, build_optimizers

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


@pytest.mark.parametrize("sparse", [True, False])
def test_update_equals_a_naive_loop(sparse):
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
