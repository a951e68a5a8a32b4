"""The HTTP process: routes, streams and what requests say about them."""
