"""Runs against a teacher that turns bad: a spoiling server, a killer, a comparer."""
