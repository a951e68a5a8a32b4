"""Real SGLang on a plain CPU, for tests and demonstrations. It does nothing on a GPU.

``platform.py`` is the platform, ``forkserver.py`` starts several engines from one import.
"""
