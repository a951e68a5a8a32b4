"""Benchmarks: they print a table and JSON, and compare within one run."""
