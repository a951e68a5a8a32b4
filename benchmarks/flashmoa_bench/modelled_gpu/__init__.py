"""A GPU that is modelled: engines on a CPU take the time of its forwards."""
