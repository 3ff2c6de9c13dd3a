"""Sites in a running model: which calls are GEMMs with a parameter, who makes them, and what share they are."""
