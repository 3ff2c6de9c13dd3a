"""Triton, which runs in its interpreter where there is no GPU; files that import it from here skip without it."""

import pytest

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
tl = triton.language
