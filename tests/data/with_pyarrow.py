"""Pyarrow; files that import it from here skip without it."""

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'loka[data]')")
parquet = pytest.importorskip("pyarrow.parquet")
