"""Benchmarks of links between agents, on one engine or two."""
