"""Measure how many requests a second ``flashmoa router`` passes on, and its CPU time for each.

Two stub engines answer at once. Prompts have 137 token ids, of which the first 64 are the same.
Stubs and client share one process; each router is a process of its own, behind its own port, and
gets its part of the connections. So on two cores the client takes some of the routers' time, and
the CPU time of a request is the more certain figure.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack

import anyio
import httpx
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from flashmoa.engine.local import free_port
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.processes import process_cpu_seconds
from flashmoa_bench.harness.report import Report

_END = b"\r\n\r\n"
_SHARED, _OWN = 64, 73
_ANSWERS = {
    b"/server_info": {"chunked_prefill_size": 16384, "max_total_num_tokens": 400_000},
    b"/flashmoa/info": {"largest_forward": 16384},
    b"/generate": {"text": "a", "meta_info": {"prompt_tokens": _SHARED + _OWN, "cached_tokens": 0}},
}


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench router-load`` and return the exit status."""
    parser = make_parser("router_load", __doc__)
    parser.add_argument("--routers", type=positive, default=1, help="processes")
    parser.add_argument("--connections", type=positive, default=64, help="to each router")
    parser.add_argument("--seconds", type=positive, default=6, help="length of the measurement")
    options = parser.parse_args(arguments)
    report = Report("router_load", options)
    report.print_head()
    requests, cpu = anyio.run(_measure, options.routers, options.connections, options.seconds)
    rate, each = requests / options.seconds, 1000 * cpu / requests
    report.console.print(
        f"{rate:,.0f} requests/s, {each:.2f} ms of CPU in routers for each", highlight=False
    )
    report.save({"requests_per_second": rate, "cpu_ms_per_request": each})
    return 0


async def _measure(routers: int, connections: int, seconds: float) -> tuple[int, float]:
    """Return the number of requests, and the CPU seconds that the routers took for them."""
    counts: list[int] = []
    cpu = 0.0
    async with AsyncExitStack() as listeners, anyio.create_task_group() as group:
        urls: list[str] = []
        for _ in range(2):
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
            listeners.push_async_callback(listener.aclose)
            urls.append(f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}")
            group.start_soon(listener.serve, _answer)
        with ExitStack() as stack:
            ports = [free_port() for _ in range(routers)]
            started: list[subprocess.Popen[bytes]] = []
            for port in ports:
                started.append(stack.enter_context(_start(urls, port)))
                stack.callback(started[-1].terminate)
            for router, port in zip(started, ports, strict=True):
                await _wait_until_ready(router, port)
            cpu -= sum(process_cpu_seconds(each.pid) for each in started)
            async with anyio.create_task_group() as clients:
                for number in range(connections * routers):
                    clients.start_soon(_ask, ports[number % routers], number, seconds, counts)
            cpu += sum(process_cpu_seconds(each.pid) for each in started)
        group.cancel_scope.cancel()
    return sum(counts), cpu


def _start(engines: Sequence[str], port: int) -> subprocess.Popen[bytes]:
    program = "import sys; from flashmoa.cli.router import main; sys.exit(main(sys.argv[1:]))"
    options = [f"--engine={url}" for url in engines]
    command = [sys.executable, "-c", program, *options, f"--port={port}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


async def _wait_until_ready(router: subprocess.Popen[bytes], port: int) -> None:
    async with httpx.AsyncClient() as http:
        with anyio.fail_after(60):
            while True:
                try:
                    if (await http.get(f"http://127.0.0.1:{port}/health")).is_success:
                        return
                except httpx.TransportError:
                    if (status := router.poll()) is not None:
                        raise RuntimeError(
                            f"a router ended with status {status}; see its log above"
                        ) from None
                await anyio.sleep(0.1)


async def _answer(stream: SocketStream) -> None:
    async with stream:
        reader = BufferedByteReceiveStream(stream)
        while True:
            try:
                head = await _receive(reader)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                return
            body = json.dumps(_ANSWERS.get(head.split(b" ")[1], {})).encode()
            kind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            await stream.send(kind + b"content-length: %d" % len(body) + _END + body)


async def _ask(port: int, number: int, seconds: float, counts: list[int]) -> None:
    """Send requests one after the other, and add their number to ``counts``."""
    dice, end, count = random.Random(number), clock.now() + seconds, 0
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        reader = BufferedByteReceiveStream(stream)
        while clock.now() < end:
            ids = [*range(_SHARED), *dice.choices(range(30_000), k=_OWN)]
            body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}).encode()
            head = b"POST /generate HTTP/1.1\r\nhost: router\r\ncontent-length: %d" % len(body)
            await stream.send(head + _END + body)
            if not (head := await _receive(reader)).startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the router answered {head[:100]!r}; see its log above")
            count += 1
    counts.append(count)


async def _receive(reader: BufferedByteReceiveStream) -> bytes:
    """Read one HTTP message, and return its head."""
    head = await reader.receive_until(_END, 1 << 16)
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.receive_exactly(int(length or 0))
    return head
