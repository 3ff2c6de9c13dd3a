from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.report import Measurement, Report, SiteReport
from loka.core.signature import LinearShape, ModelSignature

H200 = Fingerprint(device="NVIDIA H200", target="sm_90", driver="1", cuda="13.0", torch="2.11.0")


def around(value, relative):
    return Estimate(value, value * (1 - relative), value * (1 + relative))


def measured(sqnr, us=None, hp_us=100.0, *, noise=0.01):
    return Measurement(
        errors={"sqnr_db": around(sqnr, 0.01), "mere": around(0.1, 0.01)},
        microseconds=around(us, noise) if us else None,
        speedup=around(hp_us / us, noise) if us else None,
    )


def layer_report(sites, *, savings=None, notes=(), hp_us=100.0, out_features=1024, machine=H200):
    """A layer "fc" of 1024 inputs at 4096 rows; hp takes `hp_us` at each of `sites`."""
    found = {}
    for gemm, candidates in sites.items():
        problem = linear_problem(
            gemm, rows=4096, in_features=1024, out_features=out_features, dtype="bfloat16", target=machine.target
        )
        site = SiteReport(path="fc", problem=problem, measurements={"hp": measured(55.0, hp_us), **candidates})
        found[site.name] = site
    shape = LinearShape(in_features=1024, out_features=out_features, bias=False)
    return Report(
        model=ModelSignature(name="Net", layers={"fc": shape}),
        machine=machine,
        stats_digest="0",
        settings={},
        sites=found,
        quantize_once_savings={"fc": savings} if savings else {},
        notes=notes,
    )


def report(candidates, *, out_features=1024, timed=True, machine=H200):
    hp_us = 100.0 if timed else None
    return layer_report({Gemm.OUTPUT: candidates}, hp_us=hp_us, out_features=out_features, machine=machine)
