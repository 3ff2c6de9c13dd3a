"""One class per error. Every message says what failed, why, and the way out.

User mistakes are `LokaError`s; an `assert` only guards our own invariants.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import UnionType


class LokaError(Exception):
    """Base of every error LoKA raises on purpose."""

    def __init__(self, what: str, *, why: Iterable[str] = (), way_out: str = "") -> None:
        self.what = what
        self.why = tuple(why)
        self.way_out = way_out
        lines = [what, *(f"  {reason}" for reason in self.why)]
        if way_out:
            lines.append(f"Way out: {way_out}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (data loaders, torchrun); the default
        # reduction would call __init__ with the rendered message only.
        return (_rebuild, (type(self), self.what, self.why, self.way_out))


def require_kind(given: object, kind: type | UnionType, what: str, *, way_out: str) -> None:
    """Raises LokaError where `given`, which is `what` to the caller, is of another kind: a path, say, or a record of
    another stage, of which only a missing attribute would be told.
    """
    if isinstance(given, kind):
        return
    shown = repr(given) if isinstance(given, str | int | float | None) else f"of type {type(given).__name__}"
    raise LokaError(f"{what} is {shown[:80]}; it must be a {getattr(kind, '__name__', kind)}", way_out=way_out)


def require_least(settings: object, least: Mapping[str, int]) -> None:
    """Raises ValueError where a field of `settings` is below what `least` says by name. A field may be None."""
    for name, value in least.items():
        if (given := getattr(settings, name)) is not None and given < value:
            raise ValueError(f"{name} is {given}; it has to be at least {value}")


def truncated(lines: Sequence[str], most: int) -> list[str]:
    """The first `most` of `lines`, and one that counts those behind them: what an error tells of many causes."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def differing(there: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """A line for each of the names in `now` that has another value `there`."""

    def shown(value: object) -> str:
        return text if len(text := str(value)) < 120 else f"{text[:120]}..."

    return [
        f"{name}: {shown(there.get(name))} there, {shown(value)} now"
        for name, value in now.items()
        if there.get(name) != value
    ]


def first_line(error: BaseException) -> str:
    """The kind of `error` and the first line of its message, for an error or a table that names causes."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _rebuild(cls: type[LokaError], what: str, why: tuple[str, ...], way_out: str) -> LokaError:
    return cls(what, why=why, way_out=way_out)


class EffectUnknown(LokaError):
    """A budget limits the KL/H of a task or a segment that was not probed well enough."""


class NoKernelFits(LokaError):
    """No candidate can run a site's GEMM, or a named one cannot."""


class UnknownName(LokaError, KeyError):
    """A recipe, kernel, model or column that does not exist; the known ones are listed."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return Exception.__str__(self)


class FileRefused(LokaError):
    """A file LoKA wrote is truncated, edited, of another kind or version, or asks for what is gone."""


class NotWritten(LokaError, OSError):
    """A file could not be written: the disk is full or refuses. What was there before is intact."""


class PlanMismatch(LokaError):
    """A plan was made for another model or another machine; the differences are listed."""


class WrongResults(LokaError):
    """A kernel returned wrong numbers here; the evidence is listed."""


class NotConverted(LokaError):
    """`convert` or `revert` was called on a model in the wrong state."""


class NonFinite(LokaError):
    """NaN or infinity reached an FP8 site; the sites are named, first one first."""


class DataRefused(LokaError):
    """Input rows that cannot be read: a missing column, a wrong type, no rows at all."""


class CheckpointRefused(LokaError):
    """No checkpoint in a folder could be used, or it belongs to another run."""


class MissingLibrary(LokaError, ImportError):
    """An optional library is needed for this call and is not installed."""


class ServeRefused(LokaError):
    """A model, rows, weights or a folder that cannot be served as they are; what runs now goes on."""
