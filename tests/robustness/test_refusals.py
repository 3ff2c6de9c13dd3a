"""Every command, option and argument that a message names is there.

The texts are those of the source: what is raised, warned, said or shown as help. A text that names a command
is about that one; another one in a file of a command is about the commands of that file.
"""

import ast
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

import loka
from loka.cli.app import app

SOURCE = Path(loka.__file__).parent
OF_OTHERS = {"--query-gpu", "--nproc-per-node", "--gpu-name"}  # nvidia-smi's, torchrun's, ptxas'
PROSE = {"alone", "at", "found", "in", "is"}  # "without loka in Python"
_COMMAND = re.compile(r"(?<![\w./-])loka ((?:[a-z]+(?: |(?=[`,.;:)'\"]|$)))+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


@dataclass(frozen=True)
class Text:
    file: Path
    line: int
    text: str

    def __str__(self):
        return f"{self.file.relative_to(SOURCE)}:{self.line}: {self.text[:150]!r}"


@functools.cache  # every worker imports this, and one needs them
def texts():
    return [text for file in sorted(SOURCE.rglob("*.py")) for text in _of(file)]


def _of(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values]
            yield Text(file, node.lineno, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield Text(file, node.lineno, node.value)


def commands():
    def below(group, before):
        for name, command in getattr(group, "commands", {}).items():
            yield f"{before}{name}", command
            yield from below(command, f"{before}{name} ")

    return dict(below(typer.main.get_command(app), ""))


def options(*of):
    found = {"--help"}
    for command in of:
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


COMMANDS = commands()


def named(text):
    """The commands that a text names; a group where the next word is none of its commands. Words that follow
    may be prose."""
    found = []
    for match in _COMMAND.finditer(text):
        words = match[1].split()
        name = " ".join(words[:2])
        if words[0] not in PROSE:
            found.append(name if name in COMMANDS else words[0])
    return found


def test_commands_that_are_named_exist():
    wrong = [f"{text} (loka {name})" for text in texts() for name in named(text.text) if name not in COMMANDS]
    assert not wrong, "\n".join(wrong)
    assert sum(bool(named(text.text)) for text in texts()) > 40, "the texts are not found any more"


def test_options_that_are_named_exist():
    """On the command that the text names; else on one of the file's commands, or of all where it has none."""
    wrong = []
    for text in texts():
        about = [COMMANDS[name] for name in named(text.text) if name in COMMANDS]
        about = about or _commands_in(text.file) or list(COMMANDS.values())
        if "pages" in text.file.parts or not _OPTION.search(text.text):
            continue  # pages of HTML: names of colours
        missing = set(_OPTION.findall(text.text)) - options(*about) - OF_OTHERS
        wrong += [f"{text} ({', '.join(sorted(missing))})"] if missing else []
    assert not wrong, "\n".join(wrong)
    assert sum(bool(_OPTION.search(text.text)) for text in texts()) > 60


def _commands_in(file):
    module = ".".join(("loka", *file.relative_to(SOURCE).with_suffix("").parts))
    return [
        command
        for command in COMMANDS.values()
        if command.callback is not None and inspect.unwrap(command.callback).__module__ == module
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plan again: `loka plan REPORT --out PLAN`", ["plan"]),
        ("loka data convert FILES", ["data convert"]),
        ("prepare both: loka data convert, the second one", ["data convert"]),
        ("runs without loka in Python", []),
        ("loka.plan(report) and /x/loka/y", []),
    ],
)
def test_what_counts_as_a_command(text, expected):
    assert named(text) == expected


def test_names_of_python_that_are_advised_exist():
    """`loka.plan(...)`, `Plan.load`, `Probe(resume=...)` and the like in what is raised."""
    wrong = []
    for text in texts():
        for path in re.findall(r"\b(loka(?:\.[a-zA-Z_0-9]+)+)", text.text):
            if not _reached(path):
                wrong.append(f"{text} ({path})")
    assert not wrong, "\n".join(wrong)


def _reached(path):
    value = loka
    before = "loka"
    for part in path.split(".")[1:]:
        if not hasattr(value, part):
            try:
                importlib.import_module(f"{before}.{part}")
            except ImportError:
                return False
        value, before = getattr(value, part), f"{before}.{part}"
    return True
