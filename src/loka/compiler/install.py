"""Putting the pass among Inductor's. Apart from joint_pass.py, so that `import loka` loads no compiler."""

from __future__ import annotations


def install() -> None:
    """Adds the pass to Inductor's configuration, once, behind what the user has there."""
    from torch._inductor import config

    from loka.compiler.joint_pass import RegionPass

    known = config.joint_custom_pre_pass
    if not isinstance(known, RegionPass):
        config.joint_custom_pre_pass = RegionPass(known)
