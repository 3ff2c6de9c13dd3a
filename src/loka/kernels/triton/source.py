"""Triton kernels from generated text: what programs ask for, and lists of any length of tensors."""

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any


def compiled(text: str, name: str, names: Mapping[str, Any]) -> Any:
    """The function `name` that `text` defines, with `names` as its globals.

    Triton reads a kernel's source by way of linecache, where the text is left. Its cache on disk goes by the
    text, so that a second process compiles nothing.
    """
    path = f"<loka {name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    scope = {**names, "__name__": __name__}
    exec(compile(text, path, "exec"), scope)
    return scope[name]
