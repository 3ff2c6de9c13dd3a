"""What stages hand on: statistics, reports, plans, and their JSON."""
