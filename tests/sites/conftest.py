"""Each test compiles from nothing: Dynamo stops compiling a function after eight versions of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _compiled_anew():
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
