"""What differs between the versions of prime-rl, and what the installed one has."""
