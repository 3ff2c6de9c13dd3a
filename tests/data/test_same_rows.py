import numpy as np

from loka.data import SyntheticClicks

DENSE = [[3.784, 1.386, 0.693], [0.0, 1.609, 0.0], [2.89, 1.386, 0.693]]
SPARSE = [[2, 21, 3], [1, 2, 4], [4, 1, 13]]
SEQUENCE = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 3, 0, 0]]
LOGITS = [-1.795, 0.811, -2.109]


def test_other_rows_would_be_another_generation():
    """Where this fails on purpose, `GENERATION` grows: then identities differ as the rows do."""
    source = SyntheticClicks(rows=3, seed=1, vocab_sizes=(5, 40, 300), dense_features=3, history=4)
    (batch,) = source.batches(3)
    np.testing.assert_allclose(batch.dense, DENSE, atol=1e-3)
    assert batch.sparse.tolist() == SPARSE
    assert batch.label.tolist() == [0, 1, 0]
    assert batch.sequence.tolist() == SEQUENCE
    np.testing.assert_allclose(source.teacher_logits(), LOGITS, atol=1e-3)


def test_checkpoints_and_results_of_before_name_the_default_world():
    """By its identity, which follows all defaults, the sizes of 26 tables among them."""
    source = SyntheticClicks(rows=1, seed=0)
    assert len(source.vocab_sizes) == 26
    assert source.identity == "7dab4512a5a6c88610a75f9d76870ffd676f161d0c11af80252bc360189e3094"
