"""Everything that is measured on one GPU, by one command: ``docs/gpu.md``."""
