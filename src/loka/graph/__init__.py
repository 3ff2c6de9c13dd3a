"""Sites in a running model: which calls are GEMMs with a parameter, who makes them, what share they are."""
