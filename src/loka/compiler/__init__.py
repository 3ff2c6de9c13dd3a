"""Regions: what torch.compile makes of sites and the code between them.

A pass over Inductor's joint graph, in which PyTorch itself has written down who reads what, forward and
backward. See joint_pass.py for what it does, cones.py for what it may.
"""

from loka.core.compiling import mend_compilers


def install() -> None:
    """Adds the pass to Inductor's configuration, once, behind what the user has there."""
    from torch._inductor import config

    from loka.compiler.joint_pass import RegionPass  # here, so that `import loka` loads no compiler

    mend_compilers()
    known = config.joint_custom_pre_pass
    if not isinstance(known, RegionPass):
        config.joint_custom_pre_pass = RegionPass(known)
