import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from with_pyarrow import pa, parquet

from loka.data import Schema
from loka.data.files import open_files
from loka.data.source.rows import count_piece, count_rows, piece_chunks, pieces_of, read_rows

SCHEMA = Schema(label="y", dense=("d",), sparse=("c",))
ROWS = 211


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    table = pa.table({"y": [0] * ROWS, "d": list(range(ROWS)), "c": ["x"] * ROWS})
    parquet.write_table(table, folder / "t.parquet", row_group_size=10)
    (folder / "t.csv").write_text("y,d,c\n" + "".join(f"0,{row},x\n" for row in range(ROWS)))
    return {kind: open_files(folder / f"t.{kind}")[0] for kind in ("parquet", "csv")}


def numbers(chunks):
    return [int(number) for chunk in chunks for number in chunk.table.column("d").to_pylist()]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(target=st.integers(40, 4000))
def test_pieces_have_all_rows_once_in_order(files, kind, target):
    pieces = pieces_of(files[kind], SCHEMA, target=target)
    read = [numbers(piece_chunks(piece, SCHEMA)) for piece in pieces]
    assert [count_piece(piece, SCHEMA) for piece in pieces] == [len(rows) for rows in read]
    assert list(itertools.chain(*read)) == list(range(ROWS))
    assert count_rows(files[kind], SCHEMA) == ROWS
    if target < 200:
        assert len(pieces) > 5


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.tuples(st.integers(0, 2 * ROWS), st.integers(0, 2 * ROWS)).map(sorted))
def test_a_range_may_span_files_and_formats(files, cut):
    rows = [*range(ROWS), *range(ROWS)]
    both = (files["csv"], files["parquet"])
    read = [*read_rows(both, SCHEMA, first=cut[0], last=cut[1])]
    assert numbers(chunk for _, chunk in read) == rows[slice(*cut)]
    assert sum(len(chunk) for file, chunk in read if file is files["csv"]) == len(range(*cut)[: max(ROWS - cut[0], 0)])
