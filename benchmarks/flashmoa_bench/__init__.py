"""FlashMoA's benchmarks: each prints tables, writes JSON, and compares within one run."""
