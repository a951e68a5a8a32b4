"""FlashMoA's SGLang plugin: prompt streams, ``/prefill_only`` and what belongs to them.

Every SGLang process imports it, so it does nothing itself. ``sglang/hooks.py`` lists the
hooks, ``serve.py`` is the launcher.
"""

__version__ = "0.2.0"
