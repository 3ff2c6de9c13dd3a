import pytest
from click_files import write_tsv


@pytest.fixture
def path(tmp_path):
    from conversions import ROWS

    return write_tsv(tmp_path / "t.tsv", ROWS)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("loka.data.conversion.LEAST_SHARD", 8_000)
    monkeypatch.setattr("loka.data.conversion.GROUP_ROWS", 16)
    monkeypatch.setattr("loka.data.categories.vocabulary.PIECE_BYTES", 10_000)
