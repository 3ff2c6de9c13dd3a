"""Times of GEMMs, layers and regions."""
