"""Steps on many GPUs, before there are any; start at `across.py`."""
