"""Deciding every site, and running the model that way: plan, agree, convert, revert, diff."""

from loka.planner.collective_plan import agree
from loka.planner.convert import convert, revert
from loka.planner.diff import PlanDiff, diff
from loka.planner.plan import plan

__all__ = ["PlanDiff", "agree", "convert", "diff", "plan", "revert"]
