"""Rules between the tables of a recipe."""
