import pytest
import torch
from served import BOTH, Tower, frozen, rows

from loka.core.exceptions import ServeRefused
from loka.serve import load


def test_a_model_that_asks_how_many_rows_there_are_is_not_padded():
    """A bucket of as many rows is answered right; of fewer, by what it gives for more."""

    class Asks(Tower):
        def forward(self, dense, ids):
            return super().forward(dense, ids) * (2 if len(ids) > 8 else 1)

    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match="answers 2 rows by other numbers among 16"):
        frozen(Asks().eval(), BOTH, buckets=(1, 16))


def test_an_output_that_is_masked_hides_no_other_numbers():
    class Masks(Tower):
        def forward(self, dense, ids):
            y = super().forward(dense, ids) * (1.5 if len(ids) > 8 else 1)
            return torch.stack([y, torch.full_like(y, -torch.inf)], dim=1)

    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match="answers 2 rows by other numbers among 16"):
        frozen(Masks().eval(), BOTH, buckets=(1, 16))


def test_requests_are_not_written_to():
    """By rows beyond a bound that no calibration row reached."""

    class Clamps(Tower):
        def forward(self, dense, ids):
            return super().forward(dense.clamp_(-9, 9), ids)

    torch.manual_seed(0)
    server = frozen(Clamps().eval(), BOTH, buckets=(16,))
    dense, ids = rows(16)
    dense[3] = 20.0
    before = dense.clone()
    server((dense, ids))
    assert torch.equal(dense, before)


class Halves(Tower):
    def forward(self, dense, ids):
        return super().forward(dense.float(), ids).half()


def test_a_callers_autocast_of_another_half_precision(tmp_path):
    """It refuses to join tensors of float16 under bfloat16, as padding and splitting do."""
    model, (dense, ids) = Halves().eval(), rows(40)
    request = dense.half(), ids
    expected = frozen(model, BOTH, calibration=[request], buckets=(16,))(request).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        server = frozen(model, BOTH, calibration=[request], buckets=(16,))
        server.save(tmp_path)
        for each in (server, load(tmp_path, model)):
            assert torch.equal(each(request).output, expected)
