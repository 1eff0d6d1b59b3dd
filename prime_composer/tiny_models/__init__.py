"""Small models built on the spot, for recipes that need no download."""
