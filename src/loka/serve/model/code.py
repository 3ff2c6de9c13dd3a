"""Which Python a model's calls run, as a digest: by it a graph that was kept is told from one of other code."""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from loka.core.storage.files import digest_of
from loka.nn.unwrap import kind_of, named_modules

NUMBERS = (int, float, complex, str)
_DEEPEST = 40  # Python's own stack is of some hundred such calls


def numbers_of(module: nn.Module) -> dict[str, str]:
    """As text, by which NaN is NaN."""
    return {name: repr(value) for name, value in vars(module).items() if isinstance(value, NUMBERS)}


def digest_of_code(tree: nn.Module) -> str:
    """Of the modules' classes with all their functions, of functions and numbers that these name among the globals of
    their files, and of numbers and functions in attributes. What code finds in another way is in no digest.
    """
    seen: dict[int, str] = {}
    parts = []
    for path, module in named_modules(tree):
        kind = kind_of(module)
        functions = {name: _of(value, seen) for name, value in vars(module).items() if isinstance(value, FunctionType)}
        numbers = {name: repr(value) for name, value in _inherited(kind) if isinstance(value, NUMBERS)}
        numbers |= numbers_of(module)  # which may stand before those of the class, equal or not
        parts.append([path, f"{kind.__module__}.{kind.__qualname__}", numbers, functions, _of(kind, seen)])
    return digest_of(parts)


def _of(value: Any, seen: dict[int, str], depth: int = 0) -> str:
    """Of a function, a class, or a number; "" for anything else, and for what lies deeper than `_DEEPEST` calls."""
    if isinstance(value, NUMBERS) or value is None:
        return repr(value)
    if isinstance(value, (classmethod, staticmethod, functools._lru_cache_wrapper)):
        value = value.__wrapped__
    if isinstance(value, property):
        return "".join(_of(each, seen, depth) for each in (value.fget, value.fset))
    if not isinstance(value, (FunctionType, type)) or _is_known(str(value.__module__)) or depth > _DEEPEST:
        return ""
    if id(value) not in seen:
        seen[id(value)] = ""  # where it calls itself
        if isinstance(value, type):
            parts = sorted([name, _of(each, seen, depth + 1)] for name, each in _inherited(value))
        else:
            parts = [[name, _of(each, seen, depth + 1)] for name, each in _named(value)]
            parts.append(["code", _text(value.__code__)])
        seen[id(value)] = digest_of(parts)
    return seen[id(value)]


def _inherited(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class and its bases hold, those that are known apart; of a name that of the class comes last."""
    for each in reversed(kind.__mro__):
        if not _is_known(each.__module__):
            yield from (
                (name, held) for name, held in vars(each).items() if not name.startswith("__") or callable(held)
            )


def _is_known(module: str) -> bool:
    """Python's, torch's and LoKA's, whose versions a server's card holds; models of the zoo are models."""
    package, _, rest = module.partition(".")
    return package in ("torch", "builtins") or (package == "loka" and not rest.startswith("zoo"))


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads besides its arguments: globals, functions of modules among them, closures, defaults."""
    names = sorted(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, ModuleType) and not _is_known(value.__name__):
            yield from ((f"{name}.{other}", vars(value).get(other)) for other in names)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a name that has no value yet
            yield name, cell.cell_contents
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "default", default


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _text(code: CodeType) -> str:
    constants = [
        _text(each)
        if isinstance(each, CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    return hashlib.sha256(code.co_code).hexdigest() + repr((constants, code.co_names, code.co_varnames))
