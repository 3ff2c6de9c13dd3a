"""The `loka` command in this process: importing torch anew takes longer than most of what is tested."""

import contextlib
import functools
import io
import sys
from unittest import mock

from loka.cli import main
from loka.measurement import Settings, measure

SMALL = ("--rows", "3000", "--batch-size", "256")
measure_coarsely = functools.partial(measure, settings=Settings(rows=64, max_draws=4))
"""Takes the place of `measure` in commands where every error is wanted, and none to a tenth of a dB."""


def loka(*arguments, cwd, fails=False):
    """What it prints to both streams; `fails` says whether its exit status has to differ from 0, or is it."""
    text = io.StringIO()
    status = 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        mock.patch.object(sys, "argv", ["loka", *map(str, arguments)]),
    ):
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
    right = (status != 0) == fails if isinstance(fails, bool) else status == fails
    assert right, f"exit status {status}: {text.getvalue()}"
    return text.getvalue()
