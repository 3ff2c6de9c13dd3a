"""Rows of files as they are: text, parquet."""
