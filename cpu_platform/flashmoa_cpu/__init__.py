"""Real SGLang on a plain CPU: in its own time, or in that of a GPU (``modelled_gpu/``).

It is for tests, demonstrations and measurements, and not installed where SGLang has a GPU.
``platform.py`` is the platform, ``forkserver.py`` starts several engines from one import.
"""
