"""What every other package uses: recipes, problems, budgets, errors, records and their files, numerics."""
