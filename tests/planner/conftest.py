"""Pytest puts the folder of this file on the path, so that folders below find what stands in it."""
