"""How many connections there are to engines, and how long they are kept."""

from __future__ import annotations

import httpx

# SGLang closes a connection that was idle for 5 s (``SGLANG_TIMEOUT_KEEP_ALIVE``). A request on its
# way at that moment is lost, so ours are closed long before.
KEPT_SECONDS = 2.0
# Few are kept, since httpx looks at each idle one for each request; how many are in use at a time,
# engines decide.
CONNECTIONS = httpx.Limits(
    max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEPT_SECONDS
)
