"""Route prefill work over several engines: by cached prefix, by FLOPs, and up to saturation.

After MoE-Prefill, §7 and Appendix B. The policy that decides is pure: the router notifies it of
events, and it returns the engine of each request. ``application`` is the HTTP server around it.
"""
