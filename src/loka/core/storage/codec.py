"""JSON of records, by the types of their dataclasses.

    encode(record) -> what json.dumps takes        decode(Record, content) -> Record

A dataclass is an object with its fields in order; a `@record(row=True)` is a list of them, with `sparse`
defaults at its end left out. The fields of an `inline` record stand among those of its owner, and a `named`
field keeps the name that files know it by. Properties that a record lists as `derived` are written for
readers of the file, and passed over when it is read. Mappings, tuples, enums, None, texts and numbers are
what they are; infinities and nan, which JSON has not, are texts.

`decode` refuses what does not fit with a ValueError that names the place, as "decisions.fc/output.problem.m".
Numbers stay as they were written: a record that is read and written again has the same bytes.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, overload

T = TypeVar("T")

_SPARSE = "left out of JSON where it has its default"
_INLINE = "its fields stand among those of its owner"
_NAME = "called so in JSON"
_FORM = "_form_of_record"
_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", bool: "true or false"}
_DEEPEST = 50  # of values of any type; whatever walks through them has a stack of its own


@dataclass(frozen=True)
class _Form:
    row: bool = False
    ignore: frozenset[str] | None = frozenset()
    check: Callable[[Any], None] | None = None
    derived: tuple[str, ...] = ()


def record(
    *,
    row: bool = False,
    ignore: frozenset[str] | None = frozenset(),
    check: Callable[[Any], None] | None = None,
    derived: tuple[str, ...] = (),
) -> Callable[[type[T]], type[T]]:
    """How a dataclass stands in JSON, where that is not an object of exactly its fields.

    Args:
        row: as a list of its fields.
        ignore: names that earlier versions wrote, and that are passed over; None: all that are no fields.
        check: called with what was read; raises ValueError for values that cannot be.
        derived: properties that follow from the fields, such as a verdict: written, and never read.
    """

    def mark(cls: type[T]) -> type[T]:
        setattr(cls, _FORM, _Form(row, ignore, check, derived))
        return cls

    return mark


def sparse(default: Any = MISSING, *, default_factory: Any = MISSING, name: str | None = None) -> Any:
    """A field that is left out of JSON where it has its default: such records are as before there was one."""
    return field(default=default, default_factory=default_factory, metadata={_SPARSE: True, _NAME: name})


def named(name: str, default: Any = MISSING, *, default_factory: Any = MISSING) -> Any:
    """A field that is called `name` in JSON: stored records keep the name that it had before."""
    return field(default=default, default_factory=default_factory, metadata={_NAME: name})


def inline() -> Any:
    """A field that is a record, whose own fields stand in JSON among those of its owner."""
    return field(metadata={_INLINE: True})


def encode(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(entry) for entry in value]
    if not is_dataclass(value):
        raise TypeError(f"{value!r} has no form in JSON")
    form, kept = _form(type(value)), list(fields(value))
    if form.row:
        while kept and _left_out(value, kept[-1]):
            kept.pop()
        return [encode(getattr(value, entry.name)) for entry in kept]
    found: dict[str, Any] = {}
    for entry in kept:
        inner = encode(getattr(value, entry.name))
        if entry.metadata.get(_INLINE):
            found |= inner
        elif not _left_out(value, entry):
            found[_name(entry)] = inner
    return found | {name: encode(getattr(value, name)) for name in form.derived}


@overload
def decode(kind: type[T], content: Any, *, at: str = "") -> T: ...
@overload
def decode(kind: Any, content: Any, *, at: str = "") -> Any: ...
def decode(kind: Any, content: Any, *, at: str = "") -> Any:
    """`content` as a `kind`, which may also be a type such as `Mapping[str, Estimate]`."""
    return _decode(kind, content, at)


def _decode(kind: Any, content: Any, at: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _shallow(content, at)
    if origin in (types.UnionType, typing.Union):
        if content is None and type(None) in inner:
            return None
        kinds = [one for one in inner if one is not type(None)]
        if len(kinds) > 1:  # one value, or a mapping of such by name
            named = isinstance(content, dict)
            kinds = [one for one in kinds if (typing.get_origin(one) is not None) == named]
        (kind,) = kinds
        return _decode(kind, content, at)
    if origin is Literal:
        return content if content in inner else _refuse(at, f"one of {', '.join(map(repr, inner))}", content)
    if origin is tuple:
        entries = _is(list, content, at)
        each = inner[:1] * len(entries) if inner[-1] is Ellipsis else inner
        if len(each) != len(entries):
            _refuse(at, f"a list of {len(each)}", content)
        return tuple(_decode(each[place], entry, f"{at}[{place}]") for place, entry in enumerate(entries))
    if origin is not None and issubclass(origin, Mapping):
        entries = _is(dict, content, at)
        return {_key(inner[0], key, at): _decode(inner[1], entry, _below(at, key)) for key, entry in entries.items()}
    if kind is float:
        return _number(content, at)
    if kind in (int, str, bool):
        return _is(kind, content, at)
    if issubclass(kind, enum.Enum):
        known = {one.value: one for one in kind}
        if not isinstance(content, str) or content not in known:
            _refuse(at, f"one of {', '.join(map(repr, known))}", content)
        return known[content]
    if not is_dataclass(kind):  # such as a tensor, which its owner put in the place of its name
        return content if isinstance(content, kind) else _refuse(at, f"a {kind.__name__}", content)
    return _dataclass(kind, content, at)


def _dataclass(kind: Any, content: Any, at: str) -> Any:
    form, hints = _form(kind), _hints(kind)
    known = {_name(entry): entry for entry in fields(kind)}
    if form.row:
        entries = _is(list, content, at)
        if len(entries) > len(known):
            _refuse(at, f"a list of at most {len(known)}", content)
        given = dict(zip(known, entries, strict=False))
    else:
        given = dict(_is(dict, content, at))
        for name in (name for name, entry in known.items() if entry.metadata.get(_INLINE)):
            inner = {_name(each) for each in fields(hints[name])} & given.keys()
            given[name] = {key: given.pop(key) for key in inner}
        strange = given.keys() - known - set(form.derived)
        if form.ignore is not None and (strange - form.ignore):
            raise ValueError(f"{at or 'it'} has {', '.join(sorted(map(str, strange)))}, of which nothing is known")
    values = {}
    for name, entry in known.items():
        if name in given:
            place = at if entry.metadata.get(_INLINE) else _below(at, name)
            values[entry.name] = _decode(hints[entry.name], given[name], place)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{_below(at, name)} is missing")
    found = kind(**values)
    try:
        if form.check is not None:
            form.check(found)
    except ValueError as error:
        raise ValueError(f"{at}: {error}" if at else str(error)) from None
    return found


def _form(kind: type) -> _Form:
    found: _Form = getattr(kind, _FORM, _Form())
    return found


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _name(entry: Field[Any]) -> str:
    return entry.metadata.get(_NAME) or entry.name


def _left_out(value: Any, entry: Field[Any]) -> bool:
    return bool(entry.metadata.get(_SPARSE)) and getattr(value, entry.name) == _default(entry)


def _default(entry: Field[Any]) -> Any:
    return entry.default_factory() if entry.default_factory is not MISSING else entry.default


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else str(name)


def _is(kind: type, content: Any, at: str) -> Any:
    if type(content) is not kind:
        _refuse(at, _NAMES[kind], content)
    return content


def _key(kind: type, key: str, at: str) -> Any:
    """JSON has texts for keys; those that are numbers are written as `str` writes them."""
    if kind is not int:
        return key
    return int(key) if key == str(int(key)) else _refuse(at, "under whole numbers", key)


def _number(content: Any, at: str) -> float:
    if isinstance(content, str) and content in ("inf", "-inf", "nan"):
        return float(content)
    if isinstance(content, bool) or not isinstance(content, (int, float)):
        _refuse(at, "a number", content)
    return content


def _shallow(content: Any, at: str, left: int = _DEEPEST) -> Any:
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    if not left and inner:
        raise ValueError(f"{at or 'it'} is nested deeper than {_DEEPEST}")
    for entry in inner:
        _shallow(entry, at, left - 1)
    return content


def _refuse(at: str, wanted: str, content: Any) -> Any:
    raise ValueError(f"{at or 'it'} has to be {wanted}, and is {str(content)[:80]!r}")
