"""Fixtures for all tests. Triton kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests/models.py

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    skip = pytest.mark.skip(reason="needs a CUDA GPU of capability 9.0 or newer")
    for item in items:
        if "gpu" in item.keywords and not capable:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
