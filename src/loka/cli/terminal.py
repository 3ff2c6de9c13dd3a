"""Prints to the terminal. Names in what is printed may come from records and models of others.

A module may be called "\\x1b[2J": sent to a terminal as it is, that clears the screen, and other sequences
set its title, hide lines or type for the user. So control characters are printed as Python writes them.
"""

import re
import sys

# C0 but tab and newline, DEL and C1, line separators, what turns the direction of text, and lone surrogates,
# which no terminal takes.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with each control character as "\\x1b" or "\\u202e"."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(value: object = "", *, error: bool = False) -> None:
    """Prints text that is safe on a terminal, to standard error on request."""
    stream = sys.stderr if error else sys.stdout
    text = printable(f"{value}\n")
    if stream is not None and (encoding := getattr(stream, "encoding", None)):  # one that lacks a letter of a name
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    # The end of the line with it: `print` writes it by itself, behind what another rank wrote meanwhile.
    print(text, end="", file=stream, flush=True)
