"""What differs between the versions of prime-rl, and what the installed one has.

records        the loss contracts, one record per version of the TOML, and the old ones by name
toml_shapes    how the TOML has teachers, environments, directories and resume
config_fields  which record the installed prime-rl fits, and the keys that it takes
capabilities   the one table of what we touch in prime-rl, and the rule that says whether it fits
sources        prime-rl's signatures, without importing it
doctor         capabilities against sources: what works
"""
