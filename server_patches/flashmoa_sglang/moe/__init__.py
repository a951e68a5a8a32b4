"""Prefill-only MoE: asynchronous expert parallelism, saturation, engines without a KV cache."""
