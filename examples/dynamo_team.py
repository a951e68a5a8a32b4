"""Run a linked team on two engines behind one address, a front end of NVIDIA Dynamo.

The clients know the front end only. It routes each request to a worker, and says where the next
request would go. So that worker prefills the next agent's prompt while an agent writes.

``make demo-dynamo`` starts everything on this machine's CPU, with a small English model.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT

import anyio
import httpx
from anyio.abc import Process
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from engines import GUIDE, run_program
from smollm2 import smollm2

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.engine.local import WITHOUT_OVERLAP, free_port, wait_for_costs

MODEL = "demo"
_SERVE = [sys.executable, "-c", "import sys; from flashmoa.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Dynamo:
    """A front end and its workers, which are running.

    Attributes:
        url: the front end's address.
        engines: the addresses of the workers' engines.
        workers: the workers' processes.
        add_worker: starts one more on the next core, and returns when it is ready.
    """

    url: str
    engines: list[str]
    workers: list[Process]
    add_worker: Callable[[], Awaitable[None]]


@asynccontextmanager
async def start_dynamo(
    model: Path | str, folder: Path, *arguments: str, workers: int = 2
) -> AsyncGenerator[Dynamo]:
    """Start a front end and workers, one on each core, and wait until all are ready.

    Args:
        folder: for logs, and for the registry of Dynamo's processes.
        arguments: further arguments of `flashmoa serve`.

    Raises: RuntimeError if a process ends at its start; TimeoutError after five minutes.
    """
    shared = {**os.environ, "DYN_FILE_KV": str(folder / "discovery"), "DYN_LOG": "warn"}
    shared |= {"DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp"}
    async with AsyncExitStack() as stack:

        async def start(name: str, command: list[str], **environment: str) -> Process:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = await anyio.open_process(
                command, stdout=log, stderr=STDOUT, env={**shared, **environment}
            )
            stack.push_async_callback(_stop, process)
            return process

        async def add_worker() -> None:
            core, port = next(cores), free_port(4)
            serve = ["serve", "--dynamo", "--model-path", str(model), "--port", str(port)]
            serve += ["--served-model-name", MODEL, *arguments]
            worker = await start(f"worker-{core}", [*_SERVE, *serve], **_one_core(core))
            engine = f"http://127.0.0.1:{port}"
            dynamo.workers.append(worker)
            dynamo.engines.append(engine)
            with anyio.fail_after(300):
                while not await _is_listed(http, dynamo.url, port):
                    if worker.returncode is not None or front_end.returncode is not None:
                        raise RuntimeError(f"a process has ended at its start; see {folder}/*.log")
                    await anyio.sleep(0.5)
            await wait_for_costs(engine)

        # One for all questions: each new client reads the system's certificates for 80 ms.
        http = await stack.enter_async_context(httpx.AsyncClient())
        cores, port = itertools.count(), free_port()
        command = [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file"]
        command += ["--router-mode", "kv", "--http-port", str(port), "--migration-limit", "3"]
        front_end = await start("front-end", command)
        dynamo = Dynamo(f"http://127.0.0.1:{port}", [], [], add_worker)
        async with anyio.create_task_group() as group:
            for _ in range(workers):
                group.start_soon(add_worker)
        yield dynamo


def _one_core(core: int) -> dict[str, str]:
    """Return the environment of an engine that computes on one core.

    Two engines with a thread on every core would wait for each other in every operation. SGLang
    reads the first variable on CPUs that it has kernels for, and the second on other CPUs.
    """
    core %= os.cpu_count() or 1
    return {"SGLANG_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}


async def _is_listed(http: httpx.AsyncClient, url: str, port: int) -> bool:
    """Return whether a front end lists the worker whose engine has this port."""
    try:
        instances = (await http.get(f"{url}/health")).json()["instances"]
    except httpx.TransportError:
        return False
    return any(f":{port + 1}/" in str(each["transport"]) for each in instances)


async def _stop(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.terminate()
        with anyio.move_on_after(20):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await process.aclose()


def build_team(client: FlashMoAChatCompletionClient) -> RoundRobinGroupChat:
    """Build a team of three agents, which all have the guide in their prompts."""
    guide = GUIDE.read_text()[:4000]
    roles = {
        "planner": "You propose a day by day plan for the traveller.",
        "local": "You improve the plan with authentic local places from the guide.",
        "summary": "You merge the plan and every remark into one final travel plan.",
    }
    agents = [
        AssistantAgent(
            name,
            model_client=client,
            system_message=f"{role}\n\n{guide}",
            model_client_stream=True,  # Dynamo does not say whether it separates reasoning.
        )
        for name, role in roles.items()
    ]
    return RoundRobinGroupChat(agents, max_turns=len(agents))


async def main() -> None:
    """Start Dynamo, run the team on it, and print what linking gained."""
    model = await anyio.to_thread.run_sync(smollm2, Path(".cache/models"), print)
    print("Starting a front end of Dynamo and two workers on this CPU, in one to five minutes ...")
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--max-total-tokens", "16384", *WITHOUT_OVERLAP]
        async with start_dynamo(model, Path(folder), *arguments) as dynamo:
            print(f"Dynamo: {dynamo.url}, its workers' engines: {', '.join(dynamo.engines)}\n")
            client = FlashMoAChatCompletionClient(
                model=MODEL,
                base_url=dynamo.url,
                temperature=0,
                max_tokens=60,
                frequency_penalty=0.3,  # Small models repeat themselves.
            )
            team = build_team(client)
            async with link(team) as linked:
                result = await team.run(task="Plan a three day trip to Nepal.")
            print(linked)
            print(f"\n{result.messages[-1].content}")
            await client.close()


if __name__ == "__main__":
    run_program(main)
