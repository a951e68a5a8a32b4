"""FlashMoA's SGLang plugin: prompt streams, ``/prefill_only`` and a plain-CPU platform.

Every SGLang process imports it, so it does nothing itself. ``plugin.py`` lists the hooks, ``cpu/``
is the platform, ``serve.py`` the launcher.
"""

__version__ = "0.1.0"
