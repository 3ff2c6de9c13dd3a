"""Whether a learning rate has come down. On this depends what a prediction of KL/H says about NE by the labels.

The change of NE is mean((p - y) dz) / H + KL/H. The first part is of first order, and of either sign, while weights
still move with every batch. It shrinks with the learning rate, and KL/H knows nothing of it (validation/annealed.py).
"""

ANNEALED_RATE = 0.1
"""Of the peak: above it the weights still wander."""


def annealing_note(final_rate: float | None) -> str:
    """What to say of a model whose last learning rate was this share of the peak; None where nobody said."""
    if final_rate is None:
        return (
            "is this model annealed? Not known: the statistics do not say how the learning rate went. KL/H "
            "tells the change of NE by the labels only where it has decayed (docs/validate.md)"
        )
    if final_rate <= ANNEALED_RATE:
        return (
            f"is this model annealed? Its last learning rate is {final_rate:.2g} of the peak, so by that it "
            "is; `loka validate` also looks whether the weights rest"
        )
    return (
        f"is this model annealed? NO: its last learning rate is {final_rate:.2g} of the peak. NE by the "
        "labels also changes by a first-order part of either sign, of which KL/H knows nothing "
        "(docs/validate.md)"
    )
