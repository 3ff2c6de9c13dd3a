"""Digests of which Python a model's calls run, and of what its modules keep beside their tensors.

By the first a graph that was kept is told from one of other code; by the second, a version from one of other numbers.
"""

import contextlib
import enum
import functools
import hashlib
import inspect
import logging
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import nn

from loka.core.device import value_bytes
from loka.core.exceptions import first_line
from loka.core.storage.files import PACKAGE, digest_of, digest_of_sources
from loka.nn.site import site_forwards
from loka.nn.unwrap import kind_of, named_modules
from loka.serve.run import Runner

_LOG = logging.getLogger("loka.serve")
_NUMBERS = (int, float, complex, str)
_REPRESENTED = (
    *_NUMBERS,
    type(None),
    bytes,
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_WRAPPERS = (classmethod, staticmethod, functools._lru_cache_wrapper)
_HELD = ("_parameters", "_buffers", "_modules")
_SHOWN = ("collections", "datetime", "decimal", "fractions", "operator", "re")
_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
_DEEPEST = 40  # Python's own stack is of some hundred such calls

_Seen = dict[int, tuple[Any, str]]
"""By id: what was read, which lives on by it, and its digest; "" while it is read."""


def steady_data(module: nn.Module, run: Runner, device: torch.device, *, unsaved: bool = False) -> dict[str, str]:
    """As `data_of`, without what `forward` notes of its rows, as how many there are, and counts."""

    def after(rows: int) -> dict[str, str]:
        run(module, run.form.check_rows(device, rows))
        return data_of(module, unsaved=unsaved)

    first, second = after(2), after(3)
    return {name: data for name, data in first.items() if second.get(name) == data}


def data_of(tree: nn.Module, *, unsaved: bool = False) -> dict[str, str]:
    """By path and name, digests of what modules keep beside parameters, buffers and modules: numbers, texts and values
    of tensors, and containers and objects of these. What is called is code, and left out.

    unsaved: with buffers that are in no state dict, and the text of classes, without what that calls.
    """
    kept = {id(each) for each in tree.state_dict(keep_vars=True).values()} if unsaved else set()
    seen = {id(each): each for each in (*tree.parameters(), *tree.buffers()) if not unsaved or id(each) in kept}
    found = {}
    for path, module in named_modules(tree):
        held = {name: each for name, each in vars(module).items() if name not in _HELD and "_hooks" not in name}
        for name, value in (*held.items(), *module._buffers.items()):  # a scripted module's are no mapping
            with contextlib.suppress(Exception):  # of any kind: objects of the model's answer what they like
                if (data := _data(value, seen)) is not None:
                    found[f"{path}.{name}" if path else name] = digest_of(data)[:16]
    return found | (_codes(tree) if unsaved else {})


def _codes(tree: nn.Module) -> dict[str, str]:
    """Of classes, by names that have Python's version, as bytecode differs by that."""
    texts: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(kind_of(module) for _, module in named_modules(tree)):
        texts.setdefault(f"the code of {kind.__qualname__} ({_PYTHON})", []).append(_texts(kind))
    return {name: digest_of(each)[:16] for name, each in texts.items() if any(each)}


def _texts(kind: type) -> list[list[str]]:
    """Of methods and properties, those of torch and LoKA apart, by name."""
    found = []
    for name, value in _inherited(kind):
        with contextlib.suppress(Exception):  # of any kind, as above
            function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
            if isinstance(function, FunctionType):
                found.append([name, _text(function.__code__)])
    return found


def _data(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    if isinstance(value, enum.Enum):
        return [value.name, _data(value.value, seen, depth + 1)]
    if isinstance(value, _REPRESENTED):
        return repr(value)
    if callable(value) or id(value) in seen or depth > _DEEPEST:
        return None
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return _form(value) + _values(value)
    if type(value).__module__ == "numpy":
        return _array(value)
    if isinstance(value, dict):
        return [[_data(each, seen, depth + 1) for each in pair] for pair in dict.items(value)]
    if isinstance(value, (list, tuple, deque)):
        return [_data(each, seen, depth + 1) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_data(each, seen, depth + 1)) for each in value)
    if _is_opaque(type(value)):
        return _shown(value)
    return {name: _data(each, seen, depth + 1) for name, each in _attributes(value, type(value))}


def digest_of_code(tree: nn.Module) -> str | None:
    """Of the modules' classes and attributes, and of what their functions name among the globals of their files:
    functions, classes, numbers, containers and objects of these, and tensors with their values. Of parameters and
    buffers it is the form alone. What code finds in another way is in no digest. None where an object raises that is
    read.
    """
    try:
        return _digest_of(tree)
    except Exception as error:  # of any kind: objects of the model's answer what they like
        _LOG.info("no digest of the model's code: %s", first_line(error))
        return None


def _digest_of(tree: nn.Module) -> str:
    modules = list(named_modules(tree))
    seen: _Seen = {id(each): (each, _form(each)) for each in (*tree.parameters(), *tree.buffers())}
    # The innermost first: what lies deep in a tree is read as far as anything else.
    parts = [[path, _of(module, seen)] for path, module in reversed(modules)]
    return digest_of([_known(), parts, [[path, _of(each.before, seen)] for path, each in site_forwards(tree).items()]])


@functools.cache
def _known(package: Path = PACKAGE) -> tuple[str, ...]:
    """Stands for the code that `_is_known`: versions of Python and torch, and what calls run of LoKA's files."""
    return sys.version, torch.__version__, digest_of_sources("nn", "serve", "core/numerics", package=package)


def _of(value: Any, seen: _Seen, depth: int = 0) -> str:
    """ "" for what lies deeper than `_DEEPEST` calls; what is known, or has no parts, is its name."""
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name} {_of(value.value, seen, depth + 1)}"
    if isinstance(value, _REPRESENTED):
        return repr(value)
    if isinstance(value, _OPS):
        return str(value)
    if isinstance(value, torch.jit.ScriptFunction):
        return str(value.code)
    if isinstance(value, _WRAPPERS):
        value = value.__wrapped__
    if depth > _DEEPEST:
        return ""
    if id(value) not in seen:
        seen[id(value)] = value, ""  # where it reads itself
        seen[id(value)] = value, _digest(value, seen, depth + 1)
    return seen[id(value)][1]


def _digest(value: Any, seen: _Seen, depth: int) -> str:
    if isinstance(value, torch.Tensor):
        return _form(value) + _values(value)
    if type(value).__module__ == "numpy":
        return _array(value)
    if isinstance(value, dict):
        parts = [[_of(key, seen, depth), _of(each, seen, depth)] for key, each in dict.items(value)]
    elif isinstance(value, (list, tuple)):
        parts = [[type(value).__name__], *([_of(each, seen, depth)] for each in value)]
    elif isinstance(value, (set, frozenset)):
        parts = sorted([_of(each, seen, depth)] for each in value)
    elif isinstance(value, property):
        parts = [[_of(each, seen, depth) for each in (value.fget, value.fset)]]
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        parts = [[name, _of(each, seen, depth)] for name, each in vars(value).items()]
    elif isinstance(value, functools.partial):
        parts = [[_of(each, seen, depth) for each in (value.func, value.args, value.keywords)]]
    elif isinstance(value, MethodType):
        parts = [[_of(each, seen, depth) for each in (value.__func__, value.__self__)]]
    elif isinstance(value, (BuiltinFunctionType, ModuleType)) or (
        isinstance(value, (FunctionType, type)) and _is_known(value)
    ):
        return _name(value)
    elif isinstance(value, type):
        parts = sorted([name, _of(each, seen, depth)] for name, each in _inherited(value))
        parts.append(["name", _name(value)])
    elif isinstance(value, FunctionType):
        parts = [[name, _of(each, seen, depth)] for name, each in _named(value)]
        parts.append(["code", _text(value.__code__)])
    else:
        return _object(value, seen, depth)
    return digest_of(parts)


def _array(value: Any) -> str:
    whole = hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else _name(value)
    return digest_of([whole, str(getattr(value, "dtype", "")), str(getattr(value, "shape", ""))])


def _object(value: Any, seen: _Seen, depth: int) -> str:
    """Of an object's class and attributes. One of a known class, but for modules and namespaces, is its class."""
    kind = kind_of(value) if isinstance(value, nn.Module) else type(value)
    if _is_opaque(kind):
        return _name(kind) + _shown(value)
    # Those of the class may stand behind those of the object, equal or not.
    held = dict(_inherited(kind)) | dict(_attributes(value, kind))
    return digest_of([_of(kind, seen, depth), {name: _of(each, seen, depth) for name, each in held.items()}])


def _is_opaque(kind: type) -> bool:
    return _is_known(kind) and not issubclass(kind, (nn.Module, Namespace, SimpleNamespace))


def _shown(value: Any) -> str:
    """Of fractions and getters, for two, what they hold; "" for what is of the process, such as locks and loggers."""
    text = repr(value) if type(value).__module__ in _SHOWN else ""
    return "" if "0x" in text else text


def _attributes(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    for each in kind.__mro__:
        for name, place in vars(each).items():
            if isinstance(place, MemberDescriptorType):  # of __slots__
                with contextlib.suppress(AttributeError):
                    yield name, place.__get__(value)
    for name, each in getattr(value, "__dict__", {}).items():
        # Keys of hooks are numbers that the process counts.
        yield name, list(each.values()) if "_hooks" in name and isinstance(each, Mapping) else each


def _form(value: torch.Tensor) -> str:
    plain = value.layout is torch.strided and not value.is_nested  # others have no strides, or no shape
    return f"{value.dtype} {value.layout} {(tuple(value.shape), value.stride()) if plain else ''}"


def _values(value: torch.Tensor) -> str:
    """Of a tensor that is neither parameter nor buffer: code may take numbers of it into a graph."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
        return ""
    if value.is_meta or value.is_quantized or value.is_nested:
        return ""
    return hashlib.sha256(value_bytes(value)).hexdigest()


def _name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__  # torch.classes has any attribute that it is asked for, and raises
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return f"{getattr(value, '__module__', None)}.{name}"


def _inherited(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class and its bases hold, those that are known apart; of a name that of the class comes last."""
    for each in reversed(kind.__mro__):
        if not _is_known(each):
            yield from (
                (name, held) for name, held in vars(each).items() if not name.startswith("__") or callable(held)
            )


def _is_known(value: Any) -> bool:
    """Python's, torch's and LoKA's, for which `_known` stands; models of the zoo are models."""
    package, _, rest = str(value.__name__ if isinstance(value, ModuleType) else value.__module__).partition(".")
    known = package == "torch" or (package in sys.stdlib_module_names and package != "__main__")
    return known or package == "builtins" or (package == "loka" and not rest.startswith("zoo"))


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads besides its arguments: globals, what it names of modules among them, closures, defaults."""
    names = sorted(_names(function.__code__))
    modules: set[int] = set()
    waiting = [(name, function.__globals__.get(name)) for name in reversed(names)]
    while waiting:
        name, value = waiting.pop()
        yield name, value
        if isinstance(value, ModuleType) and not _is_known(value) and id(value) not in modules:
            modules.add(id(value))
            waiting += [(f"{name}.{other}", vars(value)[other]) for other in names if other in vars(value)]
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
