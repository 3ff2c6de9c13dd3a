"""JSON of records: what is written is what was written before there was a codec; what does not fit is refused
by its place."""

from __future__ import annotations

import enum
import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from loka.core.storage.codec import conforming, decode, encode, record, sparse
from loka.core.storage.files import canonical, write_record

STORED = Path(__file__).parents[3] / "benchmarks/wukong_step/report.json.gz"


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
    name="x",
    level="high",
    rows={"r": (Row(1), Row(2, math.inf))},
    limit=-math.inf,
    late=True,
    settings={"k": [1]},
)


def test_there_and_back() -> None:
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


def test_numbers_stay_as_they_were_written() -> None:
    """Or digests of records would differ after reading and writing them."""
    for text in ("1", "1.0", "1e-05", "0.1"):
        assert json.dumps(encode(decode(float, json.loads(text)))) == json.dumps(json.loads(text))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": 1}, "name has to be a text, and is '1'"),
        ({"kind": "b"}, "kind has to be one of 'a'"),
        ({"kind": ["a"]}, "kind has to be one of 'a'"),
        ({"level": "mid"}, "level has to be one of 'low', 'high', and is 'mid'"),
        ({"rows": {"r": [[1], 7]}}, r"rows.r\[1\] has to be a list"),
        ({"rows": {"r": [[1, 2, 3]]}}, r"rows.r\[0\] has to be a list of at most 2"),
        ({"rows": {"r": [[]]}}, r"rows.r\[0\].left is missing"),
        ({"rows": {"r": [[True]]}}, "left has to be a whole number, and is 'True'"),
        ({"rows": {"r": [[1.0]]}}, "left has to be a whole number"),
        ({"rows": []}, "rows has to be an object"),
        ({"limit": "1e999"}, "limit has to be a number"),
        ({"limit": True}, "limit has to be a number"),
        ({"late": 1}, "late has to be true or false"),
        ({"other": 1}, "it has other, of which nothing is known"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(change: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(Record, {**encode(FULL), **change})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": 1}, "name has to be a text, and is '1'"),
        ({"kind": "a"}, "kind has to be a Kind"),
        ({"level": "mid"}, "level has to be one of 'low', 'high'"),
        ({"rows": {"r": [Row(1)]}}, r"rows.r has to be a tuple"),
        ({"rows": {"r": (Row(1), 7)}}, r"rows.r\[1\] has to be a Row"),
        ({"rows": {"r": (Row(True),)}}, r"rows.r\[0\].left has to be a whole number"),
        ({"rows": {3: ()}}, "rows has to be a str"),
        ({"limit": "1.5"}, "limit has to be a number"),
        ({"late": None}, "late has to be true or false"),
        ({"settings": {"k": json.loads("[" * 60 + "]" * 60)}}, "settings is nested deeper than 50"),
    ],
)
def test_what_was_read_by_hand_conforms_to_its_types(change: Mapping[str, Any], why: str) -> None:
    assert conforming(FULL) is FULL
    with pytest.raises(ValueError, match=why):
        conforming(replace(FULL, **change))


def test_keys_that_are_numbers_are_written_as_such() -> None:
    assert decode(Mapping[int, str], {"7": "x"}) == {7: "x"}
    for key in ("07", " 7", "x"):
        with pytest.raises(ValueError):
            decode(Mapping[int, str], {key: "x"})
    with pytest.raises(ValueError, match="nested deeper"):
        decode(Any, json.loads("[" * 60 + "]" * 60))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="name is missing"):
        decode(Record, {})
    with pytest.raises(TypeError, match="has no form in JSON"):
        encode(object())


def test_records_are_written_as_before_there_was_a_codec() -> None:
    machine = Fingerprint(device="d", target="cpu", driver="", cuda="", torch="2", libraries={"triton": "3"})
    problem = Problem(gemm=Gemm.OUTPUT, m=1, n=2, k=3, dtype="bfloat16", target="cpu")
    use = WeightUse(caller="c", key="w", form="f")
    shape = LinearShape(in_features=3, out_features=2, bias=True)
    for value, text in (
        (
            machine,
            '{"device":"d","target":"cpu","driver":"","cuda":"","torch":"2","libraries":{"triton":"3"}}',
        ),
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
    with pytest.raises(ValueError, match="is no problem"):
        decode(Problem, {**encode(problem), "m": 0})


def test_a_report_of_before_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    before = json.loads(gzip.decompress(STORED.read_bytes()))["content"]
    Report.load(STORED).save(tmp_path / "report.json")
    after = json.loads((tmp_path / "report.json").read_bytes())["content"]
    ignored = before.keys() - after.keys()
    assert ignored <= {
        "chain_times",
        "chains",
        "cross_times",
        "crosses",
        "turned_times",
        "shared",
        "shared_times",
    }
    assert canonical({name: before[name] for name in after}) == canonical(after)
    assert list(after) == [name for name in before if name not in ignored]


def test_a_file_says_where_it_does_not_fit(tmp_path: Path) -> None:
    content = json.loads(gzip.decompress(STORED.read_bytes()))["content"]
    site = next(iter(content["sites"]))
    content["sites"][site]["problem"]["m"] = "many"
    write_record(tmp_path / "report.json", kind="loka-report", version=2, content=content)
    with pytest.raises(FileRefused, match=r"problem\.m has to be a whole number, and is 'many'"):
        Report.load(tmp_path / "report.json")
