"""Benchmarks of requests that only prefill."""
