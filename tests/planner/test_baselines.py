from reports import measured, report

from loka.core.budget import Budget
from loka.core.records.report import Measurement
from loka.planner.baselines import fastest_of_library, libraries_of, library_of, only_library

REPORT = report(
    {
        "torch:rowwise_e4m3": measured(28.5, 120.0),
        "torch_fast:rowwise_e4m3": measured(28.0, 110.0),
        "torch_fast:tensorwise_e4m3": measured(20.0, 50.0),
        "emulated:rowwise_e4m3": measured(28.5, 900.0),
        "removed:rowwise_e4m3": measured(28.5, 40.0),  # of a version before
        "torch:blockwise_e4m3": Measurement(unsupported="no"),
        "fbgemm:rowwise_e4m3": Measurement(unsupported="not installed"),
    }
)
BUDGET = Budget(min_speedup=1.0)


def test_a_library_runs_its_fastest_that_is_exact_enough():
    assert fastest_of_library(REPORT, "torch", BUDGET, everywhere=True) == {"fc/output": "torch_fast:rowwise_e4m3"}
    assert fastest_of_library(REPORT, "torch", BUDGET, everywhere=False) == {"fc/output": "hp"}
    loose = Budget(min_sqnr_db=None, min_speedup=1.0)
    for everywhere in (True, False):
        assert fastest_of_library(REPORT, "torch", loose, everywhere=everywhere) == {
            "fc/output": "torch_fast:tensorwise_e4m3"
        }
    assert fastest_of_library(REPORT, "fbgemm", BUDGET, everywhere=True) == {"fc/output": "hp"}


def test_a_prediction_layer_stays_in_hp_for_libraries_too():
    narrow = report({"torch:rowwise_e4m3": measured(28.5, 50.0)}, out_features=1)
    assert fastest_of_library(narrow, "torch", BUDGET, everywhere=True) == {"fc/output": "hp"}


def test_which_libraries_there_are():
    assert libraries_of(REPORT) == ("torch",), "emulation is no library, and a reason is no candidate"
    assert library_of("torch_fast:rowwise_e4m3@3") == "torch"
    assert library_of("hp") == "hp"
    assert library_of("removed:rowwise_e4m3") == ""
    kept = only_library(REPORT, "emulated").sites["fc/output"].measurements
    assert list(kept) == ["hp", "emulated:rowwise_e4m3"]
