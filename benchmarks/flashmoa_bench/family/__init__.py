"""Three tiny Qwen3 models that do a real task, so that Mixture-of-Agents can be right or wrong.

``questions`` and ``prompts`` are plain Python; ``network``, ``lessons`` and ``train`` are how
the models in ``weights`` were made, ``evaluate`` is what they can do (both need torch).
"""
