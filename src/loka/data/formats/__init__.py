"""One file a format that rows are read from or prepared to."""
