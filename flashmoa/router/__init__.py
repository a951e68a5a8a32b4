"""Routing prefill work over several engines: by prefix, by true FLOPs, up to saturation.

After MoE-Prefill, §7 and Appendix B. What decides is pure: it is told what happens, and says where
a request goes. The server around it is ``application``.
"""
