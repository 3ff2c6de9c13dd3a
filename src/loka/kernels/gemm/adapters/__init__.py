"""One file a kernel library, and one line in the registry."""
