"""Deciding every site, and running the model that way: plan, agree, convert, revert, diff."""

from loka.dispatch.agree import agree
from loka.dispatch.convert import convert, revert
from loka.dispatch.diff import PlanDiff, diff
from loka.dispatch.plan import plan

__all__ = ["PlanDiff", "agree", "convert", "diff", "plan", "revert"]
