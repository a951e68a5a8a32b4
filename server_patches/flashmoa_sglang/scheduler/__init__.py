"""Scheduler processes: which requests join a prefill batch, and what they share."""
