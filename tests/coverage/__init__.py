"""Measure how many calls of agent frameworks are linked: `python -m tests.coverage`."""
