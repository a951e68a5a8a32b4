"""Test that the files of deploy/ fit the commands that they run, and each other.

Their syntax is checked by `make check`.
"""

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

import kubernetes_validate
import pytest
import yaml
from fastapi import FastAPI
from flashmoa_sglang.http.api import Api
from flashmoa_sglang.sglang.releases import TESTED
from packaging.version import Version
from starlette.routing import Route

from flashmoa.cli import serve
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
IMAGE = "flashmoa-engine"
# SGLang's own route. It gives up after this many seconds (HEALTH_CHECK_TIMEOUT).
GENERATE, GENERATE_SECONDS = "/health_generate", 20
PARSE_SGLANG = """
import argparse, json, sys
from flashmoa_sglang.sglang import torchvision_ops
torchvision_ops.allow_mismatched_build()
from flashmoa_sglang.sglang.options import Options
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
Options.add_arguments(None, parser)
parsed = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
names = "host", "port", "model_path", "enable_metrics", "api_key"
print(json.dumps([{name: line[name] for name in names} for line in parsed]))
"""


@dataclass(frozen=True)
class Deployed:
    """One container of the compose file or of the manifest.

    Attributes:
        name: the name of its service or component.
        arguments: of ``flashmoa serve`` or ``python -m dynamo.frontend``.
        grace_seconds: how long it may take to end.
        ports: the ports where it listens, according to the files.
        probes: the paths that it is asked for, by the name of the probe.
    """

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, Any]
    grace_seconds: int
    ports: frozenset[int]
    probes: dict[str, str]


def load(path: str) -> Any:
    documents = list(yaml.safe_load_all((DEPLOY / path).read_text()))
    return documents if len(documents) > 1 else documents[0]


def composed(role: str) -> Iterator[Deployed]:
    for name, service in load("compose.yaml")["services"].items():
        if service["image"] == IMAGE and ("entrypoint" in service) == (role == "frontend"):
            url = urlsplit(re.findall(r"http://[^']+", service["healthcheck"]["test"][-1])[0])
            published = {int(port.rpartition(":")[2]) for port in service.get("ports", ())}
            yield Deployed(
                name,
                tuple(service["command"]),
                service["environment"],
                int(service["stop_grace_period"].removesuffix("s")),
                frozenset({cast("int", url.port), *published}),
                {"healthcheck": url.path},
            )


def components(role: str) -> list[Any]:
    of_type = {"engine": "worker", "frontend": "frontend"}[role]
    graph = load("kubernetes/graph.yaml")
    return [one for one in graph["spec"]["components"] if one["type"] == of_type]


def orchestrated(role: str) -> Iterator[Deployed]:
    for one in components(role):
        pod = one["podTemplate"]["spec"]
        (container,) = pod["containers"]
        probes = {key: value["httpGet"] for key, value in container.items() if "Probe" in key}
        named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        yield Deployed(
            one["name"],
            tuple(container.get("args", ())),
            {each["name"]: each.get("value") for each in container["env"]},
            pod["terminationGracePeriodSeconds"],
            frozenset({*named.values(), *(named[get["port"]] for get in probes.values())}),
            {key: get["path"] for key, get in probes.items()},
        )


WAYS = {"compose": composed, "kubernetes": orchestrated}


@cache
def all_of(role: str) -> list[Deployed]:
    return [one for way in WAYS.values() for one in way(role)]


def parse_engine(engine: Deployed) -> tuple[Namespace, list[str]]:
    return serve._parse_own_options(engine.arguments)


def engine_container() -> dict[str, Any]:
    (engine,) = components("engine")
    (container,) = engine["podTemplate"]["spec"]["containers"]
    return container


def test_each_way_has_two_engines_and_a_front_end() -> None:
    assert len(list(composed("engine"))) == 2
    assert [one["replicas"] for one in components("engine")] == [2]
    for way in WAYS.values():
        assert len(list(way("frontend"))) == 1


def test_kubernetes_accepts_the_files() -> None:
    graph, others = load("kubernetes/graph.yaml"), load("kubernetes/resources.yaml")
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    # Of the fields in Dynamo's Go types of this version (deploy/operator/api/v1beta1).
    assert graph["spec"].keys() == {"backendFramework", "components"}
    fields = {"name", "type", "replicas", "sharedMemorySize", "podTemplate"}
    for one in graph["spec"]["components"]:
        assert one.keys() <= fields
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": one["name"]}}
        kubernetes_validate.validate(pod | one["podTemplate"], "1.37", strict=True)
        # The only one into which the operator puts what Dynamo needs.
        assert [each["name"] for each in one["podTemplate"]["spec"]["containers"]] == ["main"]
        claims = {each["metadata"]["name"] for each in others if "Claim" in each["kind"]}
        volumes = one["podTemplate"]["spec"]["volumes"]
        assert {each["persistentVolumeClaim"]["claimName"] for each in volumes} <= claims
    # The labels are the operator's.
    (engine,) = components("engine")
    of_graph = {"nvidia.com/dynamo-graph-deployment-name": graph["metadata"]["name"]}
    of_engine = of_graph | {"nvidia.com/dynamo-component": engine["name"]}
    rules = {each["kind"]: each["spec"] for each in others if "Claim" not in each["kind"]}
    assert rules["PodDisruptionBudget"]["selector"] == {"matchLabels": of_engine}
    assert rules["NetworkPolicy"]["podSelector"] == {"matchLabels": of_graph}
    clients, dynamo = rules["NetworkPolicy"]["ingress"]
    (front_end,) = composed("frontend")
    ports = {*all_of("engine")[-1].ports, *front_end.ports}
    assert {port["port"] for port in clients["ports"]} == ports
    assert dynamo == {"from": [{"podSelector": {"matchLabels": of_graph}}]}


@pytest.mark.slow  # It imports torch.
def test_engines_start_with_these_arguments() -> None:
    lines = [parse_engine(engine)[1] for engine in all_of("engine")]
    # Parsing SGLang's arguments leaves traces in its process.
    command = [sys.executable, "-W", "ignore", "-c", PARSE_SGLANG]
    parsed = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    for engine, options in zip(all_of("engine"), json.loads(parsed.stdout), strict=True):
        assert engine.ports == {options["port"]}
        # Else it could not be reached from outside of its container, or scraped.
        assert options["host"] == "0.0.0.0" and options["enable_metrics"]
        assert options["model_path"] and options["api_key"] is None


def test_engines_are_workers_that_clients_find() -> None:
    assert all(parse_engine(engine)[0].dynamo for engine in all_of("engine"))
    container = engine_container()
    assert container["command"] == ["flashmoa", "serve"]
    (address,) = [each for each in container["env"] if each["name"] == "DYN_TCP_RPC_HOST"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_a_front_end_finds_its_engines() -> None:
    services = load("compose.yaml")["services"]
    shared = [services[one.name] for one in (*composed("engine"), *composed("frontend"))]
    for service in shared:
        assert f"discovery:{service['environment']['DYN_FILE_KV']}" in service["volumes"]
    (front_end,) = composed("frontend")
    assert services[front_end.name]["entrypoint"] == ["python3", "-m", "dynamo.frontend"]
    (port,) = front_end.ports
    assert {"--discovery-backend=file", "--router-mode=kv", f"--http-port={port}"} <= {
        *front_end.arguments
    }
    (in_cluster,) = orchestrated("frontend")
    assert in_cluster.environment["DYN_ROUTER_MODE"] == "kv"
    limit = in_cluster.environment["DYN_MIGRATION_LIMIT"]
    assert f"--migration-limit={limit}" in front_end.arguments


def test_probes_ask_for_routes_that_there_are() -> None:
    app = FastAPI()
    engine = MagicMock(max_queued_requests=None)
    Api(engine, MagicMock(), MagicMock()).add_to(app)
    of_engine = {cast("Route", route).path for route in app.routes} | {GENERATE}
    for engine in all_of("engine"):
        assert set(engine.probes.values()) <= of_engine
        # Only this one fails once the engine drains, and needs no key and no second.
        ready = {path for probe, path in engine.probes.items() if probe != "livenessProbe"}
        assert ready == {"/health/ready"}


def test_a_drain_ends_before_its_container() -> None:
    drains = [parse_engine(engine)[0].drain_seconds for engine in all_of("engine")]
    for engine, seconds in zip(all_of("engine"), drains, strict=True):
        assert seconds < engine.grace_seconds
    # The front end relays what the engines finish.
    for one in all_of("frontend"):
        seconds = int(one.environment["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"])
        assert max(drains) <= seconds < one.grace_seconds


def test_liveness_probes_wait_longer_than_sglang() -> None:
    probe = engine_container()["livenessProbe"]
    assert probe["httpGet"]["path"] == GENERATE and probe["timeoutSeconds"] > GENERATE_SECONDS


def test_prometheus_scrapes_engines_and_front_end() -> None:
    jobs = load("prometheus.yml")["scrape_configs"]
    targets = {target for job in jobs for one in job["static_configs"] for target in one["targets"]}
    scraped = [*composed("engine"), *composed("frontend")]
    assert targets == {f"{one.name}:{port}" for one in scraped for port in one.ports}


def test_files_that_compose_mounts_exist() -> None:
    services = load("compose.yaml")["services"]
    mounts = [mount.split(":") for one in services.values() for mount in one.get("volumes", ())]
    files = {to: DEPLOY / source for source, to, *_ in mounts if source.startswith(".")}
    assert len(files) == 3 and all(path.exists() for path in files.values())
    # Grafana finds Prometheus and the board.
    (source,) = load("grafana/datasources/prometheus.yaml")["datasources"]
    assert urlsplit(source["url"]).hostname == "prometheus" in services
    (boards,) = load("grafana/dashboards/flashmoa.yaml")["providers"]
    assert list(files[boards["options"]["path"]].glob("*.json"))


def test_the_image_works_with_dynamo_and_listens() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()

    def found(pattern: str) -> list[str]:
        return re.findall(pattern, dockerfile, re.MULTILINE)

    (tag,) = found(r"^ARG SGLANG_TAG=v(\S+)")
    pins = (ROOT / "requirements" / "dynamo.txt").read_text().partition("=")[0]
    first, last = re.findall(r"0\.\d+\.\d+", pins)
    assert tag in TESTED and Version(first) <= Version(tag) <= Version(last)
    assert json.loads(found(r"^ENTRYPOINT (.*)")[0]) == ["flashmoa", "serve"]
    exposed = {int(port) for port in found(r"^EXPOSE (\d+)")}
    assert all(one.ports == exposed for one in all_of("engine"))


def test_files_that_images_copy_are_in_the_build() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
    assert sources == set(re.findall(r"^!(.*)$", ignored, re.MULTILINE))
    assert all((ROOT / source).exists() for source in sources)
