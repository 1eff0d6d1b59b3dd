"""Tasks by id, played through verifiers."""
