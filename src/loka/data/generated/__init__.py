"""A synthetic world of clicks."""
