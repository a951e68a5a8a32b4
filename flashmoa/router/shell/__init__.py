"""The shell router: requests that read each other's answers, over a PD pair (Faster-MoA §4.3).

While an agent's answer is decoded, it goes into the agent prompt cache and from there, piece by
piece, into the prompts that read it, on the prefill engine alone. Only a request whose prompt is
complete goes through the pair's own router, and only its KV is transferred to the decode engine.
"""
