from models import train_steps

import loka


def probed(model, steps=8, **options):
    with loka.Probe(model, every=2, **options) as probe:
        train_steps(model, steps)
    return probe.stats()
