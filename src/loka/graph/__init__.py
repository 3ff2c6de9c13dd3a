"""Finds the sites of a running model: which calls are GEMMs with a parameter, who makes them, and what share of the
FLOPs they are.
"""
