"""How far a package may be from its server, of an output that FP8 touches and of one that it does not."""

import pytest
import torch
from served import BOTH, Tower, frozen, rows
from torch import nn

from loka.serve.packaging.aot import _most_apart
from loka.serve.rows import leaves
from loka.serve.watch.agreement import AnswerError


class Beside(Tower):
    """Its second output is computed in high precision alone."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(13, 4)

    def forward(self, dense, ids):
        return super().forward(dense, ids), torch.softmax(self.aux(dense).tanh().exp().sin(), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_output_that_fp8_does_not_touch_may_round_otherwise(autocast, tmp_path):
    torch.manual_seed(0)
    server = frozen(Beside().eval(), BOTH, autocast=autocast)
    assert server.card.answers[1].mean_abs == 0.0
    found = server.package(tmp_path / "x.pt2", batch=(1, 64))
    for one, two in zip(
        leaves(torch._inductor.aoti_load_package(str(found.path))(*rows(50))),
        leaves(server(rows(50)).output),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-2, rtol=0)


def test_how_far_apart_a_package_may_be():
    """A few units in the last place where FP8 changes nothing; a tenth of what it changes elsewhere."""
    untouched = AnswerError(changed=0.0, max_abs=0.0, mean_abs=0.0, rms=0.5)
    f32, bf16 = torch.float32, torch.bfloat16
    assert _most_apart(untouched, 0.5, [f32]) == 8 * 2.0**-23 * 0.5
    assert _most_apart(untouched, 0.5, [f32, bf16, torch.float8_e4m3fn, torch.int64]) == 8 * 2.0**-7 * 0.5
    assert _most_apart(untouched, 0.0, [f32]) == 0.0
    touched = AnswerError(changed=1.0, max_abs=0.04, mean_abs=0.01, rms=0.5)
    assert _most_apart(touched, 0.5, [bf16]) == pytest.approx(1e-3)
    hardly = AnswerError(changed=0.1, max_abs=1e-8, mean_abs=1e-9, rms=0.5)
    assert _most_apart(hardly, 0.5, [bf16]) == 8 * 2.0**-23 * 0.5
