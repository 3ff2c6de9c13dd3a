"""The rate of a fused row-wise AdaGrad where replicas of tables see a part of each batch."""


def momentum_scaled(*, lr: float, eps: float, c: float) -> dict[str, float]:
    """The rate and epsilon by which an AdaGrad that knows no c steps as by v / c.

    Of R replicas with a part of a batch each, a loss that is the mean of a part has gradients R times as
    large as the mean of the batch, in one replica of R: v, which is averaged over replicas, grows R times as
    fast as one group's. `c` = R undoes that (momentum-scaled row-wise AdaGrad of two-dimensional sparse
    parallelism, arXiv 2508.03854), and needs no other kernel:

        lr g / (sqrt(v / c) + eps) = sqrt(c) lr g / (sqrt(v) + sqrt(c) eps)

    Raises:
        ValueError: `c` is not positive.
    """
    if not c > 0:
        raise ValueError(f"c = {c} is not positive")
    return {"lr": lr * c**0.5, "eps": eps * c**0.5}
