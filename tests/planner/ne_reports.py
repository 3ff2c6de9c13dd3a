from dataclasses import replace

from reports import H200, measured

from loka.core.error import Estimate
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.report import Report, SiteReport
from loka.core.signature import LinearShape, ModelSignature

ROW, TENSOR = "torch:rowwise_e4m3", "torch:tensorwise_e4m3"


def effect(value, half=0.0):
    return Estimate(value, value - half, value + half)


def costing(us, ne, *, sqnr=28.0):
    made = measured(sqnr, us, noise=0.001)
    return replace(made, errors={**made.errors, "ne": ne}) if ne else made


def model_report(layers, *, timed=True, **others):
    """Layers of 1024 x 1024 at 4096 rows, by path; hp takes 100 us at each site."""
    sites = {}
    for path, gemms in layers.items():
        for gemm, candidates in gemms.items():
            problem = linear_problem(
                gemm, rows=4096, in_features=1024, out_features=1024, dtype="bfloat16", target="sm_90"
            )
            hp = measured(55.0, 100.0 if timed else None)
            site = SiteReport(path=path, problem=problem, measurements={"hp": hp, **candidates})
            sites[site.name] = site
    shape = LinearShape(in_features=1024, out_features=1024, bias=False)
    signature = ModelSignature(name="Net", layers=dict.fromkeys(layers, shape))
    return Report(model=signature, machine=H200, stats_digest="0", settings={}, sites=sites, **others)


def in_regions(report, kl):
    """`report` with that KL/H of what regions run at every `output`."""
    sites = {
        name: replace(site, region_kl={"rowwise_e4m3_pow2": {"": kl}}) if site.problem.gemm is Gemm.OUTPUT else site
        for name, site in report.sites.items()
    }
    return replace(report, sites=sites)


def outputs(**layers):
    return model_report({path: {Gemm.OUTPUT: found} for path, found in layers.items()})


def chosen(plan):
    return {site.removesuffix("/output"): d.candidate for site, d in plan.decisions.items()}


THREE = {
    "cheap": {ROW: costing(60, effect(1e-5))},
    "dear": {ROW: costing(50, effect(1.5e-4))},
    "slow": {ROW: costing(90, effect(1e-5))},
}
