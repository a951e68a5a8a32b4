"""SGLang's step loop with the plugin's scheduler, in virtual time: no model, no clock, no waiting.

``clock`` runs processes in virtual time, ``engine`` is an engine on a modelled GPU, and
``workloads`` are its clients. What the engine does not model: KV pressure, prefixes that requests
share, and the CPU time of its processes.
"""
