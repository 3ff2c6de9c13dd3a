import dataclasses
import importlib

import pytest
from made_bench import bench

from loka.core.exceptions import LokaError, MissingLibrary
from loka.report.plot import plot_gemm


def test_the_picture_tells_what_was_chosen(tmp_path):
    pytest.importorskip("matplotlib")
    plot_gemm(bench(), tmp_path / "new" / "gemm.svg")
    text = (tmp_path / "new" / "gemm.svg").read_text()
    for told in (
        "NVIDIA H200",
        "output: 1 shapes, geometric mean 2.00x",
        "grad_input: 1 shapes, geometric mean 1.00x",
        "whole layer, quantization shared: 1 shapes, geometric mean 1.50x",
        "bf16 kept",
        "GFLOP of one GEMM",
    ):
        assert f"<!-- {told}" in text, told  # matplotlib draws letters as paths, with the text beside
    plot_gemm(bench(), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text, "the same results make the same file"
    plot_gemm(bench(), tmp_path / "gemm.png")
    assert (tmp_path / "gemm.png").read_bytes().startswith(b"\x89PNG")


def test_results_without_times_and_other_files_are_refused(tmp_path):
    with pytest.raises(LokaError, match="no times to draw"):
        plot_gemm(dataclasses.replace(bench(), contests={}), tmp_path / "gemm.png")
    with pytest.raises(LokaError, match=r"\.png, \.svg, \.pdf"):
        plot_gemm(bench(), tmp_path / "gemm.doc")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    def hidden(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", hidden)
    with pytest.raises(MissingLibrary, match=r"loka\[plot\]"):
        plot_gemm(bench(), tmp_path / "gemm.png")
