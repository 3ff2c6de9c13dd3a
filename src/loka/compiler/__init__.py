"""Regions: what torch.compile makes of sites and the code between them.

A pass over Inductor's joint graph, in which PyTorch itself has written down who reads what, forward and
backward. See joint_pass.py for what it does, cones.py for what it may.
"""
