"""A tape of a teacher: its answers, kept in a folder and read again."""
