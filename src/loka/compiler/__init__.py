"""Regions: what torch.compile makes of sites and the code between them.

LoKA adds a pass to Inductor, which rewrites the joint graph of forward and backward. In that graph PyTorch itself has
written down who reads which value. joint_pass.py says how the pass is added, lower.py what it writes, and
edges/cones.py which code it may take.
"""

from loka.core.compiling import mend_compilers


def install() -> None:
    """Adds the pass to Inductor's configuration, once, behind the passes that the user has there."""
    from torch._inductor import config

    from loka.compiler.joint_pass import RegionPass  # here, so that `import loka` loads no compiler

    mend_compilers()
    known = config.joint_custom_pre_pass
    if not isinstance(known, RegionPass):
        config.joint_custom_pre_pass = RegionPass(known)
