import copy
import math
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from served import (
    BLOCK,
    BOTH,
    GROUP,
    POW2,
    ROW,
    TENSOR,
    TORCH,
    Cross,
    Tower,
    calibration,
    converted,
    cross_plan,
    frozen,
    plan_for,
    rows,
    skip_where_missing,
    tower,
)
from torch import nn

import loka
from loka.core.exceptions import PlanMismatch, ServeRefused
from loka.core.numerics.reference import quantize, scale_of
from loka.core.recipe import RECIPES
from loka.nn.site import site_forwards
from loka.serve import freeze
from loka.serve.freeze import HEADROOM, LEAST_ROWS
from loka.serve.rows import form_of, pad
from loka.serve.watch.agreement import AnswerError


def answered(model, inputs, autocast):
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        return model(*inputs)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("candidate", [ROW, POW2, GROUP, TORCH, ("hp", ROW, ROW), (ROW, ROW, ROW)])
def test_frozen_equals_converted_bit_for_bit(candidate, autocast):
    skip_where_missing(TORCH if candidate == TORCH else ROW)
    model = tower()
    plan = plan_for(model, {"first": candidate, "second": ROW})
    server = freeze(model, plan, calibration=calibration(), autocast=autocast, buckets=(64,))
    request = rows(50, seed=7)
    padded = pad(request, 64, form_of(request))
    expected = answered(converted(model, plan), padded, autocast)
    assert torch.equal(server(request).output, expected[:50])
    assert torch.equal(server(tuple(padded)).output, expected)  # and those of the rows of padding


def test_raw_parameters_and_stacked_experts():
    torch.manual_seed(0)
    model = Cross().eval()
    plan = cross_plan(model, ROW)
    assert set(plan.candidates("v").values()) == {ROW, "hp"}
    x = torch.randn(64, 24)
    server = freeze(model, plan, calibration=[x])
    expected = answered(converted(model, plan), [x], None)
    answer = server(x)
    assert all(torch.equal(answer.output[name], expected[name]) for name in expected)
    assert not torch.equal(answer.output["each"], answered(model, [x], None)["each"])
    assert set(server.card.sites) == {"v", "w", "experts"}
    assert len(server.card.kept) == 3


@pytest.mark.parametrize("before", [False, True])
def test_the_model_stays_as_it_was(before):
    model = tower().train()
    plan = plan_for(model, BOTH)
    if before:
        loka.convert(model, plan)
    state, attributes = copy.deepcopy(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    tensors = {name: id(parameter) for name, parameter in model.named_parameters()}
    request = rows(64)
    server = freeze(model, plan, calibration=calibration())
    answer = server(request).output
    assert model.training
    assert bool(site_forwards(model)) == before
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == tensors
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # as training goes on, the server must not follow
    assert torch.equal(server(request).output, answer)


def test_weights_are_kept_once_and_in_eight_bits():
    model = tower()
    server = frozen(model, BOTH)
    assert server.card.dropped == ("first.weight", "second.weight")
    held = server._current.module.state_dict()
    assert [key for key, value in held.items() if value.is_meta] == ["first.weight", "second.weight"]
    sides = 24 * 37 + 37 * 30
    assert server.card.dense_bytes == (sides + 4 * (37 + 30), 2 * sides)


class ReadsWeights(Tower):
    def forward(self, dense, ids):
        penalty = self.first.weight.square().mean()
        return super().forward(dense.to(self.second.weight.dtype), ids) + penalty


def test_a_weight_with_another_reader_is_kept():
    torch.manual_seed(0)
    model = ReadsWeights().eval()
    plan = plan_for(model, BOTH)
    server = freeze(model, plan, calibration=calibration())
    assert server.card.dropped == ()
    request = rows(64)
    expected = answered(converted(model, plan), list(request), None)
    assert torch.equal(server(request).output, expected)


def test_tensor_scales_are_static_and_from_the_calibration_rows():
    model = tower()
    server = frozen(model, {"first": TENSOR}, buckets=(8, 64))
    with torch.no_grad():
        inputs = [torch.cat([dense, model.table(ids)], dim=1) for dense, ids in calibration()]
        cast = RECIPES["tensorwise_e4m3"].output
        scale = scale_of(torch.cat(inputs).abs().amax().reshape(1) * HEADROOM, cast[0])
        assert torch.equal(server._scales["first"], scale)
        low_x = quantize(inputs[0], cast[0], scale=scale)
        low_w = quantize(model.first.weight, cast[1])
        product = (low_x.data.float() * scale) @ (low_w.data.float() * low_w.scale).t()
        x = torch.relu(model.norm(product + model.first.bias))
        expected = model.logit(torch.relu(model.second(x))).squeeze(1)
    # The same products, summed in another order by another matrix size.
    torch.testing.assert_close(server(calibration()[0]).output, expected, atol=1e-5, rtol=1e-5)
    # A neighbour a hundred times larger would have moved a current scale.
    dense, ids = rows(64)
    alone = server((dense, ids)).output
    dense = torch.cat([dense[:32], 100 * dense[32:]])
    assert torch.equal(server((dense, ids)).output[:32], alone[:32])
    assert "static" in str(server.card)


def test_buckets_pad_split_and_slice_exactly():
    model = tower()
    plan = plan_for(model, BOTH)
    server = freeze(model, plan, calibration=calibration(), buckets=(4, 16))
    whole = converted(model, plan)
    for count, sizes in ((1, (4,)), (4, (4,)), (5, (16,)), (16, (16,)), (39, (16, 16, 16)), (33, (16, 16, 4))):
        request = rows(count, seed=count)
        answer = server(request)
        assert answer.buckets == sizes
        parts = []
        for place, size in enumerate(sizes):
            part = [column[16 * place : 16 * place + 16] for column in request]
            parts.append(answered(whole, pad(part, size, form_of(part)), None)[: part[0].shape[0]])
        assert torch.equal(answer.output, torch.cat(parts))
    nothing = server(rows(0))
    assert nothing.output.shape == (0,)
    assert nothing.nonfinite_rows == 0


@pytest.mark.parametrize("candidate", [ROW, GROUP, TENSOR])
def test_nan_stays_in_its_row(candidate):
    model = tower()
    server = frozen(model, dict.fromkeys(BOTH, candidate))
    dense, ids = rows(20)
    sound = server((dense, ids)).output
    dense = dense.clone()
    dense[3, 2] = torch.nan
    dense[19, 0] = torch.inf  # the last row, which padding repeats
    answer = server((dense, ids))
    assert answer.nonfinite_rows == 2
    others = [row for row in range(20) if row not in (3, 19)]
    assert torch.equal(answer.output[others], sound[others])
    assert not answer.output[[3, 19]].isfinite().any()


class MixesRows(Tower):
    def forward(self, dense, ids):
        return super().forward(dense - dense.mean(dim=0), ids)


class MixesOne(Tower):
    """Of each request, as a user that is looked up once; or by how many rows there are."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, dense, ids):
        return super().forward(dense, ids) - self.by(dense)


class Reduces(Tower):
    def forward(self, dense, ids):
        return super().forward(dense, ids).mean()


class Writes(Tower):
    def forward(self, dense, ids):
        return super().forward(dense.abs_(), ids)


@pytest.mark.parametrize("first", [0, 1, 40])
@pytest.mark.parametrize(
    ("build", "told"),
    [
        (MixesRows, "mixes rows"),
        (lambda: MixesOne(lambda x: x[:1].sum()), "mixes rows"),
        (lambda: MixesOne(lambda x: x[-1:].sum()), "mixes rows"),
        (lambda: MixesOne(lambda x: len(x)), "mixes rows"),
        (lambda: MixesOne(lambda x: x.roll(1, 0).sum(1)), "mixes rows"),
        (Reduces, "an output .. for"),
        (Writes, "writes to its inputs"),
    ],
)
def test_models_whose_rows_are_not_answered_by_themselves(build, told, first):
    torch.manual_seed(0)
    model = build().eval()
    with pytest.raises(ServeRefused, match=told):
        frozen(model, BOTH, calibration=[rows(first), *calibration()])


class Squeezes(Tower):
    def forward(self, dense, ids):
        y = super().forward(dense, ids)
        return {"tasks": torch.stack([y, -y, y], dim=1).squeeze(), "one": y.squeeze()}


def test_a_bucket_of_one_row_keeps_its_side():
    """Of three tasks one was answered."""
    torch.manual_seed(0)
    model = Squeezes().eval()
    with pytest.raises(ServeRefused, match=r"an output \[3\] for 1 rows, where 3 give \[3, 3\]"):
        frozen(model, BOTH)
    answer = frozen(model, BOTH, buckets=(16,))(rows(1)).output
    assert {name: list(leaf.shape) for name, leaf in answer.items()} == {"tasks": [1, 3], "one": [1]}


def test_answers_are_of_the_models_kind():
    class Named(OrderedDict):
        """As Hugging Face's outputs: entries are attributes too."""

        def __setitem__(self, name, value):
            super().__setitem__(name, value)
            self.__dict__[name] = value

    class Returns(Tower):
        def forward(self, dense, ids):
            return Named(logits=super().forward(dense, ids))

    answer = frozen(Returns().eval(), BOTH)(rows(5)).output
    assert type(answer) is Named
    assert answer.logits is answer["logits"]
    assert answer.logits.shape == (5,)


def _with(value):
    batches = calibration()
    batches[2][0][5, 5] = value
    return batches


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "0 calibration rows"),
        ([rows(0)], "0 calibration rows"),
        ([rows(LEAST_ROWS - 1)], f"{LEAST_ROWS - 1} calibration rows"),
        ([(torch.ones(64, 13), torch.ones(64, dtype=torch.long))], "all 64 calibration rows are alike"),
        (_with(torch.nan), r"(?s)first: 1 of 160 rows.*second: 1 of 160"),
        (_with(torch.inf), "first: 1 of 160 rows"),
        ([rows(64), rows(64)[0]], "not of the form"),
        ([rows(64), None], "a request is a NoneType"),
        ([(rows(64)[0], rows(63)[1])], "unequal numbers of rows"),
        (rows(64)[0], "calibration is one request"),
        ([(*rows(64), torch.ones(64))], r"(?s)positional: 0: float32 \[B, 13\].*TypeError: .*forward\(\) takes 3"),
    ],
)
def test_calibration_rows_that_say_nothing(given, told):
    model = tower()
    with pytest.raises(ServeRefused, match=told) as refused:
        frozen(model, BOTH, calibration=given)
    assert refused.value.way_out


def test_a_site_that_sees_zeros_only():
    model = tower()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(-1.0)  # behind the ReLU nothing is left
    with pytest.raises(ServeRefused, match="second: zero in all rows"):
        frozen(model, BOTH)


def test_rows_that_are_not_finite_are_not_called_zero():
    with pytest.raises(ServeRefused, match="rows hold NaN or infinity") as refused:
        frozen(tower(), BOTH, calibration=[rows(64, scale=torch.nan)])
    assert "zero in all rows" not in str(refused.value)


def test_plans_that_do_not_fit():
    model, other = tower(), tower()
    other.second = nn.Linear(37, 31, bias=False)
    with pytest.raises(PlanMismatch, match="second"):
        freeze(model, plan_for(other, BOTH), calibration=calibration())
    with pytest.raises(ServeRefused, match="depend on their neighbours"):
        frozen(model, {"first": BLOCK})
    centred = plan_for(model, {"first": "emulated:rowwise_e4m3_centred"})
    centred = replace(centred, centres={"first": (0.5,) * 24})
    with pytest.raises(ServeRefused, match="takes a vector off its input"):
        freeze(model, centred, calibration=calibration())
    with pytest.raises(ServeRefused, match="nothing to freeze"):
        frozen(model, {"first": "hp"})
    for buckets in ((), (4, 2), (0, 4)):
        with pytest.raises(ServeRefused, match="rising"):
            frozen(model, BOTH, buckets=buckets)


class TwoPaths(Tower):
    def forward(self, dense, ids):
        if float(dense.abs().max()) > 50:
            return self.logit(self.second(self.first(torch.cat([dense, self.table(ids)], dim=1)))).squeeze(1)
        return self.logit(torch.relu(self.norm(self.first(torch.cat([dense, self.table(ids)], dim=1))))[:, :30])[:, 0]


def test_a_site_that_no_row_reached_raises_when_one_does():
    torch.manual_seed(0)
    model = TwoPaths().eval()
    server = frozen(model, BOTH)
    assert server.card.unreached == ("second",)
    with pytest.raises(ServeRefused, match="second runs now and did not"):
        server(rows(64, scale=100))
    with pytest.raises(ServeRefused, match=r"(?s)not for the rows that refresh.*second"):
        frozen(model, BOTH, calibration=[rows(64), rows(64, scale=100)])


class KeepsInput(Tower):
    def forward(self, dense, ids):
        self.seen = dense
        return super().forward(self.seen, ids)


def test_a_forward_that_writes_to_the_model_answers_one_request_at_a_time():
    torch.manual_seed(0)
    model = KeepsInput().eval()
    model(rows(8)[0].requires_grad_() * 1, rows(8)[1])  # what it keeps has a graph
    server = frozen(model, BOTH)
    assert server.card.scratch == ("seen",)
    assert not frozen(tower(), BOTH).card.scratch
    requests = [rows(16, seed=seed) for seed in range(40)]
    expected = [server(request).output for request in requests]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda request: server(request).output, requests))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_eight_threads_get_the_answers_of_one(count):
    model = tower()
    server = frozen(model, BOTH, buckets=(4, 8))
    requests = [rows(1 + seed % 8, seed=seed) for seed in range(20)]
    expected = [server(request).output for request in requests]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda turn: server(requests[turn % 20]), range(count), chunksize=20)
        assert all(torch.equal(answer.output, expected[turn % 20]) for turn, answer in enumerate(found))


@pytest.mark.parametrize("named", [False, True])
def test_requests_of_another_form_are_refused(named):
    model = tower()

    def form(dense, ids):
        return {"ids": ids, "dense": dense} if named else (dense, ids)

    plan = plan_for(model, BOTH)
    server = freeze(model, plan, calibration=[form(*batch) for batch in calibration()], buckets=(64,))
    dense, ids = rows(64)
    assert torch.equal(server(form(dense, ids)).output, answered(converted(model, plan), [dense, ids], None))
    more = {**form(dense, ids), "more": ids} if named else (dense, ids, ids)
    for wrong in (form(dense.double(), ids), form(dense[:, :12], ids), dense, (dense,), form(dense, ids[:3]), more):
        with pytest.raises(ServeRefused):
            server(wrong)
    for other in (3, ids.to_sparse(), ids.to("meta")):
        with pytest.raises(ServeRefused, match="is no dense tensor with rows"):
            server((dense, other))


@pytest.mark.parametrize(
    ("mean_abs", "expected"),
    [(0.0, 20.0), (1e-3, 20.0), (0.1, 20 * math.log10(1 / (0.2 * math.sqrt(math.pi / 2)))), (0.6, 6.0)],
)
def test_two_computations_may_be_apart_by_what_eight_bits_cost(mean_abs, expected):
    """An untrained Wukong agreed to 19.1 dB, eager and compiled, where FP8 itself cost as much."""
    assert AnswerError(changed=1.0, max_abs=1.0, mean_abs=mean_abs, rms=1.0).least_db == pytest.approx(expected)
