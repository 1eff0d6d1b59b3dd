"""Recipes: one TOML file that describes what is distilled into what, how, and on which data."""

from prime_composer.recipe import rules as rules  # fills ``schema.RULES``
from prime_composer.recipe.loading import load_recipe as load_recipe
from prime_composer.recipe.routing import Routing as Routing
from prime_composer.recipe.routing import TeacherId as TeacherId
from prime_composer.recipe.schema import Recipe as Recipe
from prime_composer.recipe.schema import RecipeError as RecipeError
