import pytest

from loka.core.exceptions import DataRefused
from loka.data import Schema

PLAIN = Schema(label="y", dense=("d",), sparse=("c",))
WITH_HISTORY = Schema(label="y", dense=("d",), sparse=("c",), sequence="s", sequence_length=7)


def test_a_schema_is_read_back_from_what_it_writes():
    for schema in (PLAIN, WITH_HISTORY):
        written = schema.to_dict()
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in written.items()}
        assert Schema(**fields) == schema


def test_a_sequence_that_is_not_used_is_not_written():
    """Manifests of before there were sequences keep their digests."""
    assert set(PLAIN.to_dict()) == {"label", "dense", "sparse", "separator", "header"}
    assert set(WITH_HISTORY.to_dict()) - set(PLAIN.to_dict()) == {"sequence", "sequence_length"}


@pytest.mark.parametrize(
    ("present", "told"),
    [
        (["y;a;b"], "stands between columns"),
        (["y\ta\tb"], "stands between columns"),
        (["y;a"], "rename its columns"),
        (["y"], "rename its columns"),
        (["y", "c"], "rename its columns"),
        (["1", "0.5", "s0"], '"header": false'),
        (["y", "0.5", "s0"], "rename its columns"),
    ],
)
def test_columns_that_do_not_fit_are_told_a_way_out(present, told):
    with pytest.raises(DataRefused, match=told):
        Schema(label="y", dense=("a",), sparse=("b",)).locate(present, where="rows.csv")
