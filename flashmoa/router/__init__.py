"""Routing prefill work over several engines: by prefix, by true FLOPs, up to saturation.

After MoE-Prefill, §7 and Appendix B. The policy that decides is pure: it is told what happens and
returns where requests go. ``application`` is the server around it.
"""
