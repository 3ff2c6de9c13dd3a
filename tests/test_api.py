"""Public names and command-line options, as `api.txt` lists them.

A change that adds one, takes one away or gives it another default shows in that file, and in the review:
`python tests/test_api.py` writes it anew.
"""

import difflib
import importlib
import inspect
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
    """A line a name; of functions and classes of `loka` itself with arguments and defaults."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            whole = package == "loka" and callable(value)
            yield f"{package}.{name}{_arguments(value) if whole else ''}"


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
    """A line an argument or option of each command, with its default."""
    yield from _of_command("loka", typer.main.get_command(app))


def _of_command(path, command):
    for parameter in sorted(command.params, key=lambda parameter: parameter.name or ""):
        told = " ".join((*parameter.opts, *parameter.secondary_opts))
        default = "" if parameter.default in (None, ()) or callable(parameter.default) else f" = {parameter.default}"
        yield f"{path} {told}{default}{' required' if parameter.required else ''}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _of_command(f"{path} {name}", inner)


def listed():
    return "\n".join([*names(), *commands()]) + "\n"


def test_public_names_and_options_are_those_that_are_listed():
    known, now = LISTED.read_text().splitlines(), listed().splitlines()
    changes = [line for line in difflib.unified_diff(known, now, lineterm="", n=0) if line[:1] in "+-"]
    assert known == now, "\n".join([*changes[2:], "meant? `python tests/test_api.py` writes api.txt anew"])


def test_all_names_are_there():
    assert all(hasattr(loka, name) for name in loka.__all__)


if __name__ == "__main__":
    LISTED.write_text(listed())
