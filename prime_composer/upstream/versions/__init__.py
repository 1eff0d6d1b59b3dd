"""What differs between the versions of prime-rl, and what the installed one has.

records        one record per version: its loss contract, and how its TOML is written
toml_shapes    the ways in which they write one thing
config_fields  which record the installed prime-rl fits, and the keys that it takes
capabilities   the one table of what we touch in prime-rl, and the rule that says whether it fits
sources        prime-rl's signatures, without importing it
doctor         capabilities against sources: what works
"""
