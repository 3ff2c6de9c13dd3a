from loka.core.device import fingerprint
from loka.core.numerics.effect import OLD
from loka.core.records.report import Report
from loka.core.signature import ModelSignature


def made(**others):
    return Report(
        model=ModelSignature(name="Net", layers={}),
        machine=fingerprint("cpu"),
        stats_digest="0",
        settings={},
        sites={},
        **others,
    )


def test_reasons_are_told_once_and_kept(tmp_path):
    report = made(no_effect={"a": "no logits", "b": "no logits", "c": "a norm over the batch", "d": OLD + "no logits"})
    assert report.unknown_effects() == [
        "effect on KL/H not known: a, b: no logits",
        "effect on KL/H not known: c: a norm over the batch",
        "effect on KL/H known from earlier steps, not renewed by the latest: d: no logits",
    ]
    assert "note: effect on KL/H not known: a, b: no logits" in str(report)
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


def test_without_reasons_the_file_is_what_it_was(tmp_path):
    made().save(tmp_path / "report.json")
    assert "no_effect" not in (tmp_path / "report.json").read_text()
    assert Report.load(tmp_path / "report.json") == made()
