"""Public names and command-line options, as `api.txt` lists them below their package or command.

A change that adds one, takes one away or gives it another default shows in that file, and in the review:
`python tests/test_api.py` writes it anew.
"""

import difflib
import importlib
import inspect
import itertools
import operator
from pathlib import Path

import typer.main

import loka
from loka.cli.app import app

LISTED = Path(__file__).parent / "api.txt"
PACKAGES = (
    "loka",
    "loka.mods",
    "loka.nn",
    "loka.data",
    "loka.zoo",
    "loka.train",
    "loka.validation",
    "loka.probe",
    "loka.measurement",
    "loka.distributed",
    "loka.serve",
)


def names():
    """(package, name); of functions and classes of `loka` itself with arguments and defaults."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            whole = package == "loka" and callable(value)
            yield package, f"{name}{_arguments(value) if whole else ''}"


def _arguments(value):
    if isinstance(value, type) and issubclass(value, Exception):
        return ""
    given = inspect.signature(value).parameters.values()
    return f"({', '.join(_argument(one) for one in given)})"


def _argument(one):
    star = "*" if one.kind is one.KEYWORD_ONLY else ""
    default = "" if one.default is one.empty else f"={one.default!r}"
    return f"{star}{one.name}{'=...' if '<' in default else default}"


def commands():
    """(command, argument or option) of each, with its default."""
    yield from _of_command("loka", typer.main.get_command(app))


def _of_command(path, command):
    for parameter in sorted(command.params, key=lambda parameter: parameter.name or ""):
        told = " ".join((*parameter.opts, *parameter.secondary_opts))
        default = "" if parameter.default in (None, ()) or callable(parameter.default) else f" = {parameter.default}"
        yield path, f"{told}{default}{' required' if parameter.required else ''}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _of_command(f"{path} {name}", inner)


def listed():
    grouped = itertools.groupby([*names(), *commands()], key=operator.itemgetter(0))
    return "".join(f"{head}\n" + "".join(f"  {line}\n" for _, line in lines) for head, lines in grouped)


def spelled_out(text):
    """Each line with what it stands below."""
    head = ""
    for line in text.splitlines():
        head = head if line.startswith(" ") else line
        yield f"{head}{line[1:]}" if line.startswith(" ") else head


def test_public_names_and_options_are_those_that_are_listed():
    known, now = (list(spelled_out(text)) for text in (LISTED.read_text(), listed()))
    changes = [line for line in difflib.unified_diff(known, now, lineterm="", n=0) if line[:1] in "+-"]
    assert known == now, "\n".join([*changes[2:], "meant? `python tests/test_api.py` writes api.txt anew"])


def test_all_names_are_there():
    assert all(hasattr(loka, name) for name in loka.__all__)


if __name__ == "__main__":
    LISTED.write_text(listed())
