"""Export a recipe as a native TOML file of prime-rl.

plan           what the recipe's teachers and environments become
tables         the TOML tables, in the terms of a ``Version``
refusals       settings that prime-rl cannot express
instructions   the comment at the head of the file: servers, Slurm
toml           TOML text
exporter       ``export_recipe``, which puts these together, and what it cannot carry
"""

from prime_composer.upstream.export.exporter import Export as Export
from prime_composer.upstream.export.exporter import export_recipe as export_recipe
