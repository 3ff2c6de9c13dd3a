"""Decides what every site runs, and makes a model run that way: plan, agree, convert, confirm, revert, diff."""

from loka.planner.collective_plan import agree
from loka.planner.confirm import Confirmed, confirm
from loka.planner.convert import convert, revert
from loka.planner.diff import PlanDiff, diff
from loka.planner.plan import plan

__all__ = ["Confirmed", "PlanDiff", "agree", "confirm", "convert", "diff", "plan", "revert"]
