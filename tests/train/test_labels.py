from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import RandomRows, SmallModel

from loka.core.exceptions import DataRefused
from loka.core.numerics.label_rate import LabelRate
from loka.train import TrainConfig
from loka.train.labels import count_labels, require_both
from loka.validation.arms import ArmSpec
from loka.validation.validate import validate


@dataclass(frozen=True)
class Labelled(RandomRows):
    positive: int = 0

    def batches(self, batch_size, *, start=0):
        first = start * batch_size
        for batch in super().batches(batch_size, start=start):
            rows = range(first, first + len(batch))
            label = batch.label.new_tensor([float(row < self.positive) for row in rows])
            yield replace(batch, label=label)
            first += len(batch)


@given(rows=st.integers(1, 300), share=st.floats(0, 1), batch_size=st.integers(1, 100))
def test_labels_are_counted(rows, share, batch_size):
    source = Labelled(rows=rows, positive=round(share * rows))
    found = count_labels(source, batch_size=batch_size)["label"]
    assert (found.positives, found.rows) == (source.positive, rows)
    assert (found.share, found.varies) == (source.positive / rows, 0 < source.positive < rows)
    part = count_labels(source, batch_size=batch_size, most=50)["label"]
    assert min(rows, 50) <= part.rows < min(rows, 50) + batch_size


def test_what_they_say():
    assert str(LabelRate(positives=0, rows=40)) == "all 40 labels read are 0"
    assert str(LabelRate(positives=40, rows=40)) == "all 40 labels read are 1"
    assert str(LabelRate(positives=120, rows=100_000)).endswith("a share of 0.0012 +- 0.0002")


@pytest.mark.parametrize("positive", [0, 300])
def test_equal_held_out_labels_are_refused_before_anything_is_trained(tmp_path, positive):
    logged = []
    with pytest.raises(DataRefused) as refused:
        validate(
            SmallModel,
            RandomRows(256),
            Labelled(rows=300, positive=positive),
            [ArmSpec(name="same", apply=lambda model: model, identity={})],
            config=TrainConfig(batch_size=64),
            out=tmp_path,
            on_log=lambda name, line: logged.append(name),
        )
    assert f"the held-out rows: all 300 labels read are {int(positive > 0)}" in str(refused.value)
    assert "which column is the label" in str(refused.value)
    assert not logged
    assert not (tmp_path / "runs").exists()


def test_it_reads_no_further_than_it_has_to():
    read = []

    class Counting(Labelled):
        def batches(self, batch_size, *, start=0):
            for batch in super().batches(batch_size, start=start):
                read.append(len(batch))
                yield batch

    source = Counting(rows=1000, positive=3)
    require_both(source, batch_size=10, what="rows")
    assert read == [10]
    with pytest.raises(DataRefused):
        require_both(replace(source, positive=0), batch_size=10, what="rows")
    assert sum(read) == 1010
