"""Deciding every site, and running the model that way: plan, convert, revert, diff."""

from loka.dispatch.convert import convert, revert
from loka.dispatch.diff import PlanDiff, diff
from loka.dispatch.plan import plan

__all__ = ["PlanDiff", "convert", "diff", "plan", "revert"]
