"""Run a user's team on modelled GPUs, unlinked and linked, to see what linking would save."""
