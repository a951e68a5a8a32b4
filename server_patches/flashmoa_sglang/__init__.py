"""FlashMoA's SGLang plugin: prompt streams, ``/prefill_only`` and a plain-CPU platform.

Imported in every SGLang process, so it stays empty of work: ``plugin.py`` lists the
hooks, ``cpu/`` is the platform, ``serve.py`` the launcher.
"""

__version__ = "0.1.0"
