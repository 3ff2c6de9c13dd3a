"""Errors of every candidate at every site, and on a GPU times, from statistics alone."""

from loka.measurement.measure import measure
from loka.measurement.settings import Settings

__all__ = ["Settings", "measure"]
