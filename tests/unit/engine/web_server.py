"""Serve one answer to all requests, in threads of its own, so that it outlives event loops."""

from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread


class WebServer:
    """Counts connections and requests.

    Attributes:
        connections: how many connections are open.
        opened: how many there have been.
        requests: how many requests it has answered.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.connections = self.opened = self.requests = 0
        self._changed = Condition()

    def change(self, *, connections: int = 0, requests: int = 0) -> None:
        with self._changed:
            self.connections += connections
            self.opened += max(0, connections)
            self.requests += requests
            self._changed.notify_all()

    def has_connections(self, number: int) -> bool:
        """Wait until that many connections are open."""
        with self._changed:
            return self._changed.wait_for(lambda: self.connections == number, 5)


@contextmanager
def web_server(body: bytes, kind: str = "application/json") -> Generator[WebServer]:
    """Answer requests of every path alike."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # This keeps connections open.
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            counted.change(connections=1)

        def finish(self) -> None:
            super().finish()
            counted.change(connections=-1)

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            counted.change(requests=1)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        counted = WebServer(server.server_port)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield counted
        server.shutdown()
        thread.join()
