"""The same records dressed for people."""
