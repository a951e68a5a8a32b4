"""FlashMoA's benchmarks: each prints tables, writes JSON, and compares ways within one run."""

__version__ = "0.2.0"
