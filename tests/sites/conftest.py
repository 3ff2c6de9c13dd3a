"""Each test compiles from nothing: Dynamo stops compiling a function after eight versions of it."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _compiled_anew():
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
