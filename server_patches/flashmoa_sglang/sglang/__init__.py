"""Where the plugin meets SGLang: hooks, releases, used internals and server arguments."""
