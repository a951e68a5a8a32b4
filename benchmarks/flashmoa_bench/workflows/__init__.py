"""The benchmark of whole workflows of agents."""
