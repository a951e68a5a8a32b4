"""The benchmark of routing policies and routers."""
