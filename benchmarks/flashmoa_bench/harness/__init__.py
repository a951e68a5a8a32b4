"""Code that all benchmarks share: options, engines, requests, rounds and reports."""
