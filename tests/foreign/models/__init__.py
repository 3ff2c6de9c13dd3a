"""One file a family; each lists its `MODELS`."""
