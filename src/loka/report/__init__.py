"""The records of the other packages as tables, pictures and pages for people."""
