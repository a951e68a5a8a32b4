"""Route requests that read each other's answers over a PD pair: the shell router (Faster-MoA §4.3).

While an agent's answer is decoded, the router puts it into the agent prompt cache, and from there,
piece by piece, into the prompts that read it. Only the prefill engine computes these. A request is
sent to the pair's own router, and its KV to the decode engine, once its prompt is complete.
"""
