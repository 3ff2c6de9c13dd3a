"""Edges between sites: the graph's code read, as far as it can be joined, written as a program."""
