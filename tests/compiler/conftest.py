"""Each test compiles anew: Dynamo counts how often it compiled a frame, and gives up after eight times."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
