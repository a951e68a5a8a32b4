"""The plugin's part of the HTTP process: routes, prompt streams, and requests that use them."""
