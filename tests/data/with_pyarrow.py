import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'loka[data]')")
parquet = pytest.importorskip("pyarrow.parquet")
