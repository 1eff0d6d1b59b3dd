"""Export a recipe as a native TOML file of prime-rl."""

from prime_composer.upstream.export.exporter import Export as Export
from prime_composer.upstream.export.exporter import export_recipe as export_recipe
