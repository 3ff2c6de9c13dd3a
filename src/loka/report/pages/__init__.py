"""One HTML page."""
