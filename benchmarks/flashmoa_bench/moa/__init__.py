"""The benchmark of Mixture-of-Agents."""
