"""Minutes under load: ``pytest -m load tests/load -s`` prints the measured numbers."""
