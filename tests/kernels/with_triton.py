import pytest

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
tl = triton.language
