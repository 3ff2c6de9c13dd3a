import csv

import numpy as np
import pytest
import with_pyarrow  # noqa: F401
from click_files import assert_same, gather
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.exceptions import DataRefused
from loka.data import Schema, TableClicks, hashed_vocabulary
from loka.data.source.quotes import line_count, without_open_quotes

SCHEMA = Schema(label="y", dense=("d",), sparse=("c", "e"))
HEADER = "y,d,c,e\n"


def read(path, text):
    path.write_text(HEADER + text, newline="")
    return TableClicks(path, schema=SCHEMA, vocabulary=hashed_vocabulary(10**9))


@pytest.mark.slow
@pytest.mark.parametrize(("block_bytes", "count"), [(4 << 20, 3000), (60, 300)])
def test_stray_quotes_cost_their_own_lines(tmp_path, monkeypatch, block_bytes, count):
    monkeypatch.setattr("loka.data.source.text.BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    lines = [f"{n % 2},{n},a{n},b{n}\n" for n in range(count)]
    stray = set(map(int, rng.choice(count, count // 10, replace=False)))
    text = [line.replace(",a", ',"a') if n in stray else line for n, line in enumerate(lines)]
    source = read(tmp_path / "t.csv", "".join(text))
    assert source.rows == count - count // 10
    whole = read(tmp_path / "u.csv", "".join(line for n, line in enumerate(lines) if n not in stray))
    assert_same(gather(source), gather(whole))
    assert source.account()["malformed lines"] == len(stray)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_what_is_quoted_well_stays(tmp_path, ending):
    rows = ['1,2,"a,b",c', '0,3,5" pipe,c', '1,4,"say ""no""",c', '0,5,"a"b"c,d', '1,6,"",x', '"0",7,"x","y"']
    if ending == "\r":  # blocks end at newlines, so this is one
        source = read(tmp_path / "t.csv", ending.join(rows) + "\n")
    else:
        source = read(tmp_path / "t.csv", ending.join(rows) + ending)
    assert source.rows == len(rows)
    gather(source)
    assert source.account()["malformed lines"] == 0


@pytest.mark.parametrize("bad", ['1,1,"a,b', '1,1,x","y', '1,1,a,"', '"', '1,1,"a""', '"1,1,a,b'])
def test_a_value_that_does_not_end_on_its_line(tmp_path, bad):
    good = "0,2,c,d\n"
    for text in (f"{good}{bad}\n{good * 2}", f"{good}{bad}\n{good}{bad}\n{good}", f"{good * 3}{bad}"):
        source = read(tmp_path / "t.csv", text)
        assert source.rows == 3
        gather(source)
        assert source.account()["malformed lines"] == text.count(bad)


def test_a_value_of_the_wrong_kind_beside_quotes_is_still_refused(tmp_path):
    with pytest.raises(DataRefused, match="column d"):
        gather(read(tmp_path / "t.csv", '1,1,"a,b",c\n1,many,"a",c\n'))


@settings(max_examples=300)
@given(st.text(alphabet='ab,"\n\r', max_size=40))
def test_it_finds_what_a_csv_reader_finds(text):
    """Python's reader, given one line, asks for a second one where a quote is open."""
    block = text.encode()
    mended = without_open_quotes(block, ",")
    assert line_count(mended) == line_count(block)

    def is_open(line):
        reader = csv.reader(iter([line + "\n", "next"]))
        list(reader) if not line else next(reader)
        return reader.line_num > 1 and bool(line)

    lines = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode().split("\n")
    expected = ["" if is_open(line) else line for line in lines]
    found = mended.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode().split("\n")
    if lines[-1] and not expected[-1]:  # the line stays one: it gets the end that it lacked
        expected.append("")
    assert found == expected
