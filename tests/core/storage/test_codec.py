"""JSON of records: what is written is what was written before there was a codec; what does not fit is refused
by its place."""

import enum
import json
import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from loka.core.budget import Budget
from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import FileRefused
from loka.core.problem import Problem
from loka.core.recipe import Gemm
from loka.core.records.report import Report
from loka.core.signature import LinearShape, WeightUse
from loka.core.storage.codec import decode, encode, inline, named, record, sparse
from loka.core.storage.files import canonical, write_record

STORED = Path(__file__).parents[3] / "benchmarks/wukong_step/report.json.xz"


class Kind(enum.Enum):
    A = "a"


@record(row=True)
@dataclass(frozen=True)
class Row:
    left: int
    right: float = sparse(0.0)


@record(ignore=frozenset({"gone"}))
@dataclass(frozen=True, kw_only=True)
class Record:
    name: str
    kind: Kind = Kind.A
    level: Literal["low", "high"] = "low"
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    limit: float | None = None
    late: bool = sparse(False)
    settings: Any = None


FULL = Record(
    name="x", level="high", rows={"r": (Row(1), Row(2, math.inf))}, limit=-math.inf, late=True, settings={"k": [1]}
)


def test_there_and_back():
    content = {
        "name": "x",
        "kind": "a",
        "level": "high",
        "rows": {"r": [[1], [2, "inf"]]},
        "limit": "-inf",
        "late": True,
        "settings": {"k": [1]},
    }
    assert encode(FULL) == content
    assert list(encode(FULL)) == list(content), "in the order of the fields"
    assert decode(Record, json.loads(json.dumps(content, allow_nan=False))) == FULL
    assert "late" not in encode(Record(name="x")), "records stay as they were before there was the field"
    assert decode(Record, {"name": "x", "gone": 1}) == Record(name="x")
    assert math.isnan(decode(float, encode(math.nan)))


def test_numbers_stay_as_they_were_written():
    """Or digests of records would differ after reading and writing them."""
    for text in ("1", "1.0", "1e-05", "0.1"):
        assert json.dumps(encode(decode(float, json.loads(text)))) == json.dumps(json.loads(text))


def test_values_of_any_type_have_a_bounded_depth():
    deep = {"k": json.loads("[" * 60 + "]" * 60)}
    with pytest.raises(ValueError, match="nested deeper than 50"):
        decode(Mapping[str, Any], deep)


def test_keys_that_are_numbers_are_written_as_such():
    assert decode(Mapping[int, str], {"7": "x"}) == {7: "x"}
    for key in ("07", " 7", "x"):
        with pytest.raises(ValueError):
            decode(Mapping[int, str], {key: "x"})


def test_a_tuple_of_a_length_has_that_length():
    pairs = tuple[tuple[str, float], ...]
    assert decode(pairs, [["a", 1], ["b", "inf"]]) == (("a", 1), ("b", math.inf))
    for wrong, message in ([["a"]], "a list of 2"), ([["a", 1, 2]], "a list of 2"), ([[1, 1]], r"\[0\]\[0\] has to be"):
        with pytest.raises(ValueError, match=message):
            decode(pairs, wrong)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="name is missing"):
        decode(Record, {})
    with pytest.raises(TypeError, match="has no form in JSON"):
        encode(object())


@dataclass(frozen=True, kw_only=True)
class Sides:
    width: float
    height: float = sparse(1.0)


@record(derived=("area",))
@dataclass(frozen=True, kw_only=True)
class Box:
    name: str
    sides: Sides = inline()

    @property
    def area(self):
        return self.sides.width * self.sides.height


def test_what_follows_from_the_fields_is_written_and_passed_over_when_read():
    box = Box(name="b", sides=Sides(width=3.0))
    assert encode(box) == {"name": "b", "width": 3.0, "area": 3.0}
    assert decode(Box, {"name": "b", "width": 3.0, "area": "anything"}) == box
    assert decode(Box, {"name": "b", "width": 3.0}) == box


def test_the_fields_of_an_inline_record_stand_among_those_of_its_owner():
    box = Box(name="b", sides=Sides(width=3.0, height=math.inf))
    assert list(encode(box)) == ["name", "width", "height", "area"]
    assert decode(Box, json.loads(json.dumps(encode(box)))) == box
    with pytest.raises(ValueError, match=r"at\.width has to be a number"):
        decode(Box, {"name": "b", "width": "wide"}, at="at")
    with pytest.raises(ValueError, match=r"at\.width is missing"):
        decode(Box, {"name": "b"}, at="at")
    with pytest.raises(ValueError, match="it has depth, of which nothing is known"):
        decode(Box, {"name": "b", "width": 3.0, "depth": 1.0})


@dataclass(frozen=True, kw_only=True)
class Renamed:
    width: float = named("w")
    late: int | None = sparse(None, name="l")


def test_a_field_is_called_in_json_as_it_always_was():
    assert encode(Renamed(width=2.0)) == {"w": 2.0}
    assert encode(Renamed(width=2.0, late=1)) == {"w": 2.0, "l": 1}
    assert decode(Renamed, {"w": 2.0, "l": 1}) == Renamed(width=2.0, late=1)
    with pytest.raises(ValueError, match="w is missing"):
        decode(Renamed, {})
    with pytest.raises(ValueError, match="it has width, of which nothing is known"):
        decode(Renamed, {"width": 2.0})


def test_records_are_written_as_before_there_was_a_codec():
    machine = Fingerprint(device="d", target="cpu", driver="", cuda="", torch="2", libraries={"triton": "3"})
    problem = Problem(gemm=Gemm.OUTPUT, m=1, n=2, k=3, dtype="bfloat16", target="cpu")
    use = WeightUse(caller="c", key="w", form="f")
    shape = LinearShape(in_features=3, out_features=2, bias=True)
    for value, text in (
        (machine, '{"device":"d","target":"cpu","driver":"","cuda":"","torch":"2","libraries":{"triton":"3"}}'),
        (problem, '{"gemm":"output","m":1,"n":2,"k":3,"dtype":"bfloat16","target":"cpu"}'),
        (Estimate(1.5, -math.inf, math.inf), '[1.5,"-inf","inf"]'),
        (shape, "[3,2,true]"),
        (LinearShape(in_features=3, out_features=2, bias=False, use=use), '[3,2,false,["c","w","f",null]]'),
        (
            Budget(keep=("a",)),
            '{"min_sqnr_db":25.0,"max_mere":null,"min_speedup":1.05,"keep":["a"],"keep_prediction":true,'
            '"on_miss":"keep"}',
        ),
    ):
        assert json.dumps(encode(value), separators=(",", ":")) == text
        assert decode(type(value), json.loads(text)) == value


def test_a_report_of_before_is_written_again_with_the_same_bytes(tmp_path):
    before = json.loads(lzma.decompress(STORED.read_bytes()))["content"]
    Report.load(STORED).save(tmp_path / "report.json")
    after = json.loads((tmp_path / "report.json").read_bytes())["content"]
    ignored = before.keys() - after.keys()
    assert ignored <= {"chain_times", "chains", "cross_times", "crosses", "turned_times", "shared", "shared_times"}
    assert canonical({name: before[name] for name in after}) == canonical(after)
    assert list(after) == [name for name in before if name not in ignored]


def test_a_file_says_where_it_does_not_fit(tmp_path):
    content = json.loads(lzma.decompress(STORED.read_bytes()))["content"]
    site = next(iter(content["sites"]))
    content["sites"][site]["problem"]["m"] = "many"
    write_record(tmp_path / "report.json", kind="loka-report", version=2, content=content)
    with pytest.raises(FileRefused, match=r"problem\.m has to be a whole number, and is 'many'"):
        Report.load(tmp_path / "report.json")
