"""The plugin's part of schedulers: which requests join a prefill batch, and their shared tokens."""
