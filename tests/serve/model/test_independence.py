import pytest
import torch
from served import BOTH, Tower, calibration, frozen, rows

from loka.core.exceptions import ServeRefused
from loka.serve import load
from loka.serve.model.independence import _moved


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


@pytest.mark.parametrize("of", [lambda x: x.amax(0), lambda x: x.abs().max(), lambda x: 1e-3 * x.cumsum(0)])
def test_rows_that_are_seen_in_others_answers_alone(of):
    """A largest number is that of the batch's copies too, and sums of rows before differ little by their places."""

    class Mixes(Tower):
        def forward(self, dense, ids):
            return super().forward(dense - of(dense), ids)

    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match="mixes rows"):
        frozen(Mixes().eval(), BOTH)


def test_a_model_that_takes_pairs_of_rows_alone_is_refused():
    class Pairs(Tower):
        def forward(self, dense, ids):
            return super().forward(dense.view(-1, 2, 13).flatten(0, 1), ids)

    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match="fails for calibration rows in another order, or for other numbers"):
        frozen(Pairs().eval(), BOTH)


def test_a_model_that_fails_without_sites_is_refused():
    """As nn.TransformerEncoder in torch 2.13 on a CPU under autocast: its own fast code does not look at that."""

    class Fails(Tower):
        def forward(self, dense, ids):
            if "forward" not in vars(self.first):
                raise RuntimeError("expected scalar type Float but found BFloat16")
            return super().forward(dense, ids)

    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match="fails for calibration rows of the form"):
        frozen(Fails().eval(), BOTH)


class Counts(Tower):
    """By how many rows there are, with an output that only notes them, and one of two places that is small."""

    def __init__(self, factor, noted, mask=0.0):
        super().__init__()
        self.factor, self.noted, self.mask = factor, noted, mask

    def forward(self, dense, ids):
        y = super().forward(dense, ids)
        small = 1e-3 * y * (self.factor if len(ids) > 8 else 1.0)
        return {"y": torch.stack([y, small, y + self.mask], dim=1), "noted": self.noted(len(ids))}


@pytest.mark.parametrize(
    ("factor", "noted", "told"),
    [
        (1.05, torch.zeros, "answers 2 rows by other numbers among 16"),
        (1.0, torch.arange, "mixes rows"),
        (1.0, lambda rows: torch.full((rows,), rows), "mixes rows"),
        (1.0, lambda rows: torch.full((rows,), rows > 8), "answers 2 rows by other numbers among 16"),
    ],
)
@pytest.mark.parametrize("mask", [0.0, -torch.inf])
def test_answers_that_depend_a_little_on_how_many_rows_there_are(factor, noted, told, mask):
    """More than rounding explains, and less than a tenth; or in whole numbers."""
    torch.manual_seed(0)
    with pytest.raises(ServeRefused, match=told):
        frozen(Counts(factor, noted, mask).eval(), BOTH, buckets=(1, 16))
    frozen(Counts(1.0, torch.zeros, mask).eval(), BOTH, buckets=(1, 16))


def test_rounding_is_told_by_more_than_the_first_request():
    """It may be a single row whose answer is near zero."""
    one = rows(1)
    torch.manual_seed(0)
    first = Tower().eval()(*one).item()

    class Rounds(Tower):
        def forward(self, dense, ids):
            return super().forward(dense, ids) - first + (1e-4 if len(ids) > 8 else 0.0)

    torch.manual_seed(0)
    frozen(Rounds().eval(), BOTH, calibration=[one, *calibration()], buckets=(1, 16))


def test_rounding_of_complex_numbers_is_rounding():
    """Each is told from the other as numbers are; as whole ones, more than half of them differed."""

    class Turns(Tower):
        def forward(self, dense, ids):
            x = torch.relu(self.norm(self.first(torch.cat([dense, self.table(ids)], dim=1))))
            return torch.complex(self.second(x), self.logit(self.second(x)).expand(-1, 30))

    torch.manual_seed(0)
    frozen(Turns().eval(), BOTH, buckets=(1, 16))
    turned = torch.complex(torch.ones(64, 8), torch.arange(64.0)[:, None].expand(64, 8))
    assert not _moved(turned, turned * (1 + 1e-6), turned)
    assert _moved(turned, turned.conj(), turned)


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


class Views(Tower):
    def forward(self, dense, ids):
        return super().forward(dense.view(-1).view(len(ids), -1), ids)


def test_how_a_request_lies_in_memory_is_no_matter():
    """A model sees contiguous rows whether they are padded or not; others would raise here, or round otherwise."""
    torch.manual_seed(0)
    server = frozen(Views().eval(), BOTH, buckets=(16,))
    dense, ids = rows(16)
    transposed = dense.t().contiguous().t()
    for count in (15, 16):
        expected = server((dense[:count], ids[:count])).output
        assert torch.equal(server((transposed[:count], ids[:count])).output, expected)
