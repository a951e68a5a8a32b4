"""Check modelled GPUs against measurements on real ones."""
