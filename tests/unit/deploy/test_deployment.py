"""Test that the files of deploy/ fit the commands that they run, and each other.

Their syntax is checked by `make check`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import pytest
import yaml
from fastapi import FastAPI
from flashmoa_sglang.http.api import Api
from flashmoa_sglang.releases import TESTED
from starlette.routing import Route

from flashmoa.cli import router, serve
from flashmoa.router.application import RouterOptions, application
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
# SGLang's own route. It gives up after this many seconds (HEALTH_CHECK_TIMEOUT).
GENERATE, GENERATE_SECONDS = "/health_generate", 20
PARSE_SGLANG = """
import argparse, json, sys
from flashmoa_sglang.cpu import torchvision_ops
torchvision_ops.allow_mismatched_build()
from flashmoa_sglang.options import add_arguments
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
add_arguments(None, parser)
parsed = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
names = "host", "port", "model_path", "enable_metrics", "api_key"
print(json.dumps([{name: line[name] for name in names} for line in parsed]))
"""


@dataclass(frozen=True)
class Deployed:
    """One container of the compose file or of a manifest.

    Attributes:
        hosts: the names by which the others reach it.
        arguments: of ``flashmoa serve`` or ``flashmoa router``.
        grace_seconds: how long it may take to end.
        ports: those that it is said to listen on.
        probes: the paths that it is asked for, by the name of the probe.
    """

    hosts: tuple[str, ...]
    arguments: tuple[str, ...]
    grace_seconds: int
    ports: frozenset[int]
    probes: dict[str, str]


def load(path: str) -> Any:
    (document,) = load_all(path)
    return document


def load_all(path: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def composed(role: str) -> Iterator[Deployed]:
    for name, service in load("compose.yaml")["services"].items():
        if service["image"] == f"flashmoa-{role}":
            url = urlsplit(re.findall(r"http://[^']+", service["healthcheck"]["test"][-1])[0])
            published = {int(port.rpartition(":")[2]) for port in service.get("ports", ())}
            yield Deployed(
                (name,),
                tuple(service["command"]),
                int(service["stop_grace_period"].removesuffix("s")),
                frozenset({cast("int", url.port), *published}),
                {"healthcheck": url.path},
            )


def orchestrated(role: str) -> Iterator[Deployed]:
    documents = load_all("kubernetes/engines.yaml") + load_all("kubernetes/router.yaml")
    services = {
        one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Service"
    }
    for one in documents:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        if container["image"] != f"flashmoa-{role}":
            continue
        name = one["metadata"]["name"]
        assert services[name]["selector"] == one["spec"]["selector"]["matchLabels"]
        assert (
            one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        )
        is_set = one["kind"] == "StatefulSet"
        numbers = range(one["spec"]["replicas"])
        probes = {key: value["httpGet"] for key, value in container.items() if "Probe" in key}
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        served = {port["port"] for port in services[name]["ports"]}
        yield Deployed(
            tuple(f"{name}-{number}.{name}" for number in numbers) if is_set else (name,),
            tuple(container["args"]),
            pod["terminationGracePeriodSeconds"],
            frozenset({*served, *named.values(), *(named[get["port"]] for get in probes.values())}),
            {key: get["path"] for key, get in probes.items()},
        )


WAYS = {"compose": composed, "kubernetes": orchestrated}


@cache
def all_of(role: str) -> list[Deployed]:
    return [one for way in WAYS.values() for one in way(role)]


def parse_engine(engine: Deployed) -> tuple[Namespace, list[str]]:
    return serve._parse_own_options(engine.arguments)


def parse_router(one: Deployed) -> Namespace:
    return router._make_parser().parse_args(one.arguments)


def test_there_are_two_engines_and_a_router_each_way() -> None:
    for way in WAYS.values():
        assert len([host for engine in way("engine") for host in engine.hosts]) == 2
        assert len(list(way("router"))) == 1


@pytest.mark.slow  # It imports torch.
def test_engines_start_with_these_arguments() -> None:
    lines = [parse_engine(engine)[1] for engine in all_of("engine")]
    # Parsing SGLang's arguments leaves traces in its process.
    parsed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE_SGLANG],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert parsed.returncode == 0, parsed.stderr
    for engine, options in zip(all_of("engine"), json.loads(parsed.stdout), strict=True):
        assert engine.ports == {options["port"]}
        # Else it could not be reached from outside of its container, or scraped.
        assert options["host"] == "0.0.0.0" and options["enable_metrics"]
        assert options["model_path"] and "FLASHMOA_API_KEY" in options["api_key"]


@pytest.mark.parametrize("way", WAYS)
def test_the_router_starts_and_knows_every_engine(way: str) -> None:
    (one,) = WAYS[way]("router")
    options = parse_router(one)
    assert one.ports == {options.port} and options.host == "0.0.0.0"
    engines = list(WAYS[way]("engine"))
    urls = {
        f"http://{host}:{port}"
        for engine in engines
        for host in engine.hosts
        for port in engine.ports
    }
    assert set(options.engine) == urls
    # It asks the engines with their key.
    assert all(f"--api-key={options.api_key}" in engine.arguments for engine in engines)


def test_probes_ask_for_routes_that_there_are() -> None:
    app = FastAPI()
    engine = MagicMock(max_queued_requests=None)
    Api(engine, MagicMock(), MagicMock()).add_to(app)
    of_engine = {cast("Route", route).path for route in app.routes} | {GENERATE}
    of_router = {cast("Route", route).path for route in application(RouterOptions([])).routes}
    for role, routes in (("engine", of_engine), ("router", of_router)):
        for one in all_of(role):
            assert set(one.probes.values()) <= routes
    for engine in all_of("engine"):
        # Only this one fails once the engine drains, and needs no key and no second.
        ready = {path for probe, path in engine.probes.items() if probe != "livenessProbe"}
        assert ready == {"/health/ready"}


def test_a_drain_ends_before_its_container_is_killed() -> None:
    drains = [parse_engine(engine)[0].drain_seconds for engine in all_of("engine")]
    for engine, seconds in zip(all_of("engine"), drains, strict=True):
        assert seconds < engine.grace_seconds
    # The router relays what the engines finish.
    for one in all_of("router"):
        assert max(drains) < one.grace_seconds


def test_a_liveness_probe_waits_longer_than_sglang_does() -> None:
    _, engines, _ = load_all("kubernetes/engines.yaml")
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    probe = container["livenessProbe"]
    assert probe["httpGet"]["path"] == GENERATE and probe["timeoutSeconds"] > GENERATE_SECONDS


def test_prometheus_scrapes_the_engines_and_the_router_of_the_compose_file() -> None:
    jobs = load("prometheus.yml")["scrape_configs"]
    targets = {target for job in jobs for one in job["static_configs"] for target in one["targets"]}
    scraped = [*composed("engine"), *composed("router")]
    assert targets == {
        f"{host}:{port}" for one in scraped for host in one.hosts for port in one.ports
    }


def test_files_that_the_compose_file_mounts_are_there() -> None:
    services = load("compose.yaml")["services"]
    mounts = [mount.split(":") for one in services.values() for mount in one.get("volumes", ())]
    files = {to: DEPLOY / source for source, to, *_ in mounts if source.startswith(".")}
    assert len(files) == 3 and all(path.exists() for path in files.values())
    # Grafana finds Prometheus and the board.
    (source,) = load("grafana/datasources/prometheus.yaml")["datasources"]
    assert urlsplit(source["url"]).hostname == "prometheus" in services
    (boards,) = load("grafana/dashboards/flashmoa.yaml")["providers"]
    assert list(files[boards["options"]["path"]].glob("*.json"))


def test_images_are_of_a_tested_release_and_listen_where_they_say() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (tag,) = re.findall(r"^ARG SGLANG_TAG=v(\S+)", dockerfile, re.MULTILINE)
    assert tag in TESTED
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", dockerfile, re.M | re.S))
    for role, command in (("engine", "serve"), ("router", "router")):
        entry = json.loads(re.findall(r"^ENTRYPOINT (.*)", stages[role], re.MULTILINE)[0])
        assert entry == ["flashmoa", command]
        exposed = {int(port) for port in re.findall(r"^EXPOSE (\d+)", stages[role], re.MULTILINE)}
        assert all(one.ports == exposed for one in all_of(role))


def test_files_that_images_copy_are_there_and_are_sent_to_the_build() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    sent = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert sources == sent and all((ROOT / source).exists() for source in sources)
