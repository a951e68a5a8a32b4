"""No body ends an engine, changes another answer, or gets a 500, whichever field is hostile.

The request models name the fields, so a field that SGLang adds is tried, too.
"""

import json
import random
import re
import shutil
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.scoring import questions
from flashmoa_sglang.sglang.releases import RELEASE, Release
from pydantic import BaseModel

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import IS_0_5_12, start_special_engine
from tests.unit.plugin.renamed import installed

# The values are texts of JSON, because Python's ``json`` cannot write every value.
VALUES = [
    "null", "true", "false", "0", "1", "-1", "-5", "3", "5000", "9999999", f"{2**31}", f"{2**63}",
    f"{-(2**63) - 1}", "1" + "0" * 400, "0.5", "-0.5", "1.5", "1e-300", "1e308", "1e999", "NaN",
    "-Infinity", '""', '" "', '"x"', '"5"', '"("', '"{"', r'"\u0000"', r'"\ud800"',
    "[]", "[1]", "[-1]", "[5000]", "[9999999]", f"[{2**63}]", "[1.5]", "[true]", "[null]",
    '[""]', '["x"]', '["x", "y"]', "[[]]", "[[1]]", "[[1], []]", "[[1], [2]]", "[{}]", '[{"n": 2}]',
    "{}", '{"a": 1}', '{"1": 1}', '{"1": 1e308}', '{"1": null}', '{"1": "x"}', '{"5000": 1}',
    '{"id": "x"}', '{"id": []}', '{"type": "json_object"}', '{"a": {"b": {"c": [1]}}}',
    "[" * 975 + "]" * 975, '{"a":' * 400 + "1" + "}" * 400,
]  # fmt: skip
_IO, _OPENAI = "sglang.srt.managers.io_struct", "sglang.srt.entrypoints.openai.protocol"
GENERATION: dict[str, Any] = {
    "text": "x y z",
    "sampling_params": {"max_new_tokens": 2, "temperature": 0.8, "top_k": 5},
}
LOGPROBS: dict[str, Any] = {
    **GENERATION, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
    "token_ids_logprob": [1],
}  # fmt: skip
STREAMED: dict[str, Any] = {
    "text": "x y z", "stream": True, "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 1},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Where to?"}]


@dataclass(frozen=True)
class Route:
    """A route, its valid bodies, and the model with its fields: a class, or SGLang's by its name.

    ``inside``: the field of the body that has the model's fields, if they are not the body's.
    """

    path: str
    model: type[BaseModel] | tuple[str, str]
    bases: tuple[dict[str, Any], ...]
    inside: str = ""

    def fields(self) -> list[str]:
        if isinstance(self.model, tuple):
            # Importing SGLang takes longer than the tests.
            found = (one.names.items() for one in installed().lineage(*self.model))
            names = {name for one in found for name, text in one if not text}
        else:
            names = set(self.model.model_fields)
        return sorted({*names, "surprise", "prompt_stream_id", "expected_output_tokens"})


ROUTES = [
    Route("/generate", (_IO, "GenerateReqInput"), (GENERATION, LOGPROBS, STREAMED)),
    Route(
        "/generate",
        ("sglang.srt.sampling.sampling_params", "SamplingParams"),
        (GENERATION, LOGPROBS, STREAMED),
        inside="sampling_params",
    ),
    Route(
        "/v1/chat/completions",
        (_OPENAI, "ChatCompletionRequest"),
        ({"model": "m", "messages": MESSAGES, "max_tokens": 2},),
    ),
    Route(
        "/v1/completions",
        (_OPENAI, "CompletionRequest"),
        ({"model": "m", "prompt": "x y", "max_tokens": 2, "logprobs": 2},),
    ),
    Route(
        "/v1/responses",
        (_OPENAI, "ResponsesRequest"),
        ({"model": "m", "input": "x y", "max_output_tokens": 2},),
    ),
    Route("/prefill_only", bodies.Prompt, ({"text": "x y"},)),
    Route("/render", bodies.Prompt, ({"messages": MESSAGES},)),
    Route("/render_response", (_OPENAI, "ResponsesRequest"), ({"model": "m", "input": "x"},)),
    Route("/prompt_streams", bodies.OpenStream, ({"text": "x y"},)),
    Route("/prompt_streams/OPEN/append", bodies.Append, ({"seq": 0, "text": "x"},)),
    Route(
        "/v1/score",
        questions.ScoreBody,
        ({"query": "x", "items": ["y", "z"], "candidates": [" a", " b"]},),
    ),
    Route("/rerank", questions.RerankBody, ({"query": "x", "documents": ["y", "z"]},)),
    Route("/v1/classify", questions.ClassifyBody, ({"input": "x", "labels": ["a", "b"]},)),
]
EMBEDDING = [
    Route("/v1/embeddings", (_OPENAI, "EmbeddingRequest"), ({"model": "m", "input": "x y"},)),
    Route("/encode", (_IO, "EmbeddingReqInput"), ({"text": "x y"},)),
]
IDS = [f"{route.path} {route.inside}".strip() for route in ROUTES]


@dataclass(frozen=True)
class Cell:
    """A route's valid body, except that one field has a hostile value."""

    path: str
    body: str
    field: str
    value: str

    def __str__(self) -> str:
        return f"{self.path} {self.field}={self.value[:40]}"


def cells_of(route: Route) -> Iterator[Cell]:
    for base in route.bases:
        for field in route.fields():
            inside = dict(base.get(route.inside, {}) if route.inside else base)
            if field == "input_ids" and not route.inside:
                inside.pop("text", None)
            inside.pop(field, None)
            for value in VALUES:
                body = add(inside, field, value)
                if route.inside:
                    rest = {name: other for name, other in base.items() if name != route.inside}
                    body = add(rest, route.inside, body)
                yield Cell(route.path, body, field, value)


def add(fields: dict[str, Any], name: str, value: str) -> str:
    """Return a JSON object with one more field, whose value is JSON already."""
    begin = json.dumps(fields)[:-1] + (", " if fields else "")
    return f"{begin}{json.dumps(name)}: {value}}}"


KNOWN = {
    "text": "The plan so far: walk to the lake and",
    "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
}
KNOWN_EMBEDDING = {"text": KNOWN["text"]}


class Engine:
    """An engine that gets hostile bodies, and its first answer to a known request."""

    def __init__(self, http: httpx.AsyncClient, known: tuple[str, dict[str, Any]]) -> None:
        self._http = http
        self._known = known
        self._answer: Any = None

    async def check(self) -> None:
        """Check that the engine is alive, and answers the known request as before."""
        path, body = self._known
        try:
            answer = await self._http.post(path, json=body)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            # The server closes a connection after some answers, or just before this request.
            answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        output = answer.json()
        now = output.get("output_ids") or output["embedding"]
        self._answer = self._answer or now
        # Embeddings differ in their last digits if the beginning of a prompt was cached.
        assert now == pytest.approx(self._answer, abs=1e-4)

    async def send(self, path: str, body: str, seconds: float = 30) -> httpx.Response | None:
        """Send a body; return the answer, or ``None`` if it takes longer than some seconds."""
        opened = ""
        if "OPEN" in path:
            opened = (await self._http.post("/prompt_streams", json={"text": "a b"})).json()["id"]
            path = path.replace("OPEN", opened)
        headers = {"Content-Type": "application/json"}
        try:
            answer = await self._http.post(path, content=body, headers=headers, timeout=seconds)
        except httpx.ReadTimeout:
            return None
        if path == "/prompt_streams" and answer.is_success:
            opened = answer.json()["id"]
        if opened:
            await self._http.delete(f"/prompt_streams/{opened}")
        return answer

    async def attack(self, cell: Cell) -> None:
        # Bodies that ask for long answers are not waited for.
        fails = any(one.matches(cell) for one in FAILS_IN_SGLANG)
        try:
            answer = await self.send(cell.path, cell.body, seconds=1)
        except httpx.RemoteProtocolError as error:  # The failure has cut a streamed answer.
            assert fails, f"{cell}: {error}"
            answer = None
        if answer is not None and not fails:
            assert answer.status_code != 500, f"{cell}: {answer.text[:500]}"
        await self.check()


@dataclass(frozen=True)
class Failure:
    """Cells that SGLang answers with 500, with the plugin and without it, and the reason.

    ``field`` and ``value`` are regular expressions.
    """

    path: str
    field: str
    value: str
    reason: str

    def matches(self, cell: Cell) -> bool:
        return (
            self.path == cell.path
            and re.fullmatch(self.field, cell.field) is not None
            and re.fullmatch(self.value, cell.value) is not None
        )


# Python's json, which refuses them, is its parser of bodies.
PARSES_DEEP_BODIES = not IS_0_5_12


FAILS_IN_SGLANG = [
    Failure(
        "/v1/chat/completions",
        "response_format",
        r"(?!null)[^{].*",
        "SGLang reads it as an object before its type is checked, and before the plugin has it.",
    ),
]
if IS_0_5_12:
    reason = "SGLang 0.5.12 does not catch the error of a field's type on this route."
    FAILS_IN_SGLANG.append(Failure("/v1/responses", ".*", "(?s:.*)", reason))
    reason = "SGLang 0.5.12 returns the value, which JSON lacks, in its answer."
    FAILS_IN_SGLANG += [
        Failure("/generate", "lora_path|rid", r'"\\ud800"', reason),
        Failure("/v1/embeddings", "lora_path", r'"\\ud800"', reason),
        Failure("/encode", "lora_path|rid", r'"\\ud800"', reason),
        Failure("/encode", "received_time", "1e999|NaN|-Infinity", reason),
    ]


@pytest.fixture
async def attacked(engine: LocalEngine, client: EngineClient) -> AsyncGenerator[Engine]:
    """The engine; in the end it is idle, and all of its KV is free or evictable."""
    # The server closes connections that are not used for some seconds.
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=engine.url, timeout=60, limits=limits) as http:
        attacked = Engine(http, ("/generate", KNOWN))
        await attacked.check()
        yield attacked
        await attacked.check()
    assert engine.is_running()


def generation(top: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    fields = {"text": "hi", "sampling_params": {"max_new_tokens": 3, **sampling}}
    return {name: value for name, value in {**fields, **(top or {})}.items() if value is not None}


OTHER_PLACES = {"min_new_tokens": 1, "stop_token_ids": [999_999, -5, 5]}
# Older releases answer 200, and an abort as the finish reason.
REFUSED_BY_GRAMMAR = 500 if type(RELEASE) is Release else 200
BANS_ALL = {"logit_bias": {str(token): -1e308 for token in range(4096)}, "top_k": 5}

# Only newer releases have this field; others ignore it.
PLACES_OF_ANOTHER_REQUEST = [
    generation({field: [9]}, max_new_tokens=0)
    for field in {"token_indices_to_pool"}.intersection(ROUTES[0].fields())
]


@pytest.mark.parametrize(
    "body",
    [
        generation({"input_ids": []}),
        generation({"text": None, "input_ids": [[1], []]}),
        generation({"text": None, "input_ids": [-1]}),
        generation({"text": ""}),
        generation({"text": ["hi", "ho"], "input_ids": [[1], []]}),
        generation({"text": ["hi", ""]}),
        *(generation({"text": "", f"{kind}_data": "x"}) for kind in ("image", "video", "audio")),
        generation({"text": None, "input_ids": [[1], [999_999]]}),
        generation({"return_logprob": True, "logprob_start_len": -5}),
        generation({"return_logprob": True, "token_ids_logprob": [999_999]}),
        generation({"return_logprob": True, "token_ids_logprob": [-1]}),
        generation({"return_logprob": True, "top_logprobs_num": 9_999_999}),
        generation({"return_logprob": True, "top_logprobs_num": [1]}),
        generation({"positional_embed_overrides": "x"}),
        generation({"session_params": {"id": []}}),
        generation({"session_params": {"surprise": 1}}),
        generation({"rid": ["x"]}),
        *PLACES_OF_ANOTHER_REQUEST,
        generation({"text": ["a", "b"], "top_logprobs_num": [1], "return_logprob": True}),
        generation(top_k=2**31),
        generation(n=9_999_999),
        generation(n=[]),
        generation(stop_regex="("),
        generation(regex="\0"),
        generation(temperature=1e308),
        generation(skip_special_tokens=0),
        generation({"expected_output_tokens": 10**300}),
        generation({"expected_output_tokens": "3"}),
    ],
    ids=str,
)  # fmt: skip
async def test_a_body_that_ends_a_stock_engine_is_refused(
    attacked: Engine, body: dict[str, Any]
) -> None:
    answer = await attacked.send("/generate", json.dumps(body))
    assert answer is not None and answer.status_code == 400, answer
    assert len(answer.text) < 400


@pytest.mark.parametrize(
    ("sampling", "status"),
    [
        (OTHER_PLACES, 200),
        ({"structural_tag": ""}, 200),
        (BANS_ALL, 200),
        ({"logit_bias": {"5": 1e39}, "top_k": 5}, 200),
        ({"logit_bias": {"5": 1e35}, "top_k": 5, "temperature": 1.1e-6}, 200),
        # The grammar's only end is banned. SGLang ends a request whose token its grammar refuses.
        ({"regex": "a", "min_new_tokens": 3}, REFUSED_BY_GRAMMAR),
        ({"regex": "a", "min_new_tokens": 3, "temperature": 0}, REFUSED_BY_GRAMMAR),
    ],
    ids=str,
)
async def test_sampling_that_leaves_no_token_ends_no_engine(
    attacked: Engine, sampling: dict[str, Any], status: int
) -> None:
    answer = await attacked.send("/generate", json.dumps(generation(**sampling)))
    assert answer is not None
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("rids", [["b"], ["b", "b"]], ids=["one", "twice the same"])
async def test_a_session_that_cannot_take_a_request_refuses_it(
    attacked: Engine, http: httpx.AsyncClient, rids: list[str]
) -> None:
    """SGLang's session raises when it forgets its requests, or one of two with the same id."""
    name = f"session-{len(rids)}"
    await http.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": name})
    params: dict[str, Any] = {"id": name}
    for rid in ("a", *rids):
        body = generation({"session_params": params, "rid": rid})
        assert (await http.post("/generate", json=body)).status_code == 200
        params = {"id": name, "rid": "a"}
    replaced = {"id": name, "replace": True, **({"rid": "a"} if len(rids) > 1 else {})}
    answer = await http.post("/generate", json=generation({"session_params": replaced}))
    assert answer.status_code == 400 and "session cannot take" in answer.text
    await http.post("/close_session", json={"session_id": name})


DEEP = "[" * 975 + "]" * 975
HINTED = {
    "/generate": generation(),
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 1},
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 1},
}


@pytest.mark.parametrize("path", HINTED)
@pytest.mark.parametrize(
    "hint", ["prompt_stream_id", "expected_output_tokens", "nvext", "prompt_cache_options"]
)
async def test_a_deeply_nested_hint_is_refused_in_few_words(
    attacked: Engine, path: str, hint: str
) -> None:
    body = HINTED[path]
    answer = await attacked.send(path, add(body, hint, DEEP))
    is_read = hint != "prompt_cache_options" or "messages" in body or "input" in body
    assert answer is not None
    if not PARSES_DEEP_BODIES:
        assert answer.status_code == 400 and "error parsing the body" in answer.text
        return
    assert answer.status_code == (400 if is_read else 200), answer.text
    assert not is_read or ("must be" in answer.text and len(answer.text) < 400)


@pytest.mark.parametrize("prompt", ["x y", ["x y"], ["x y", "z"]], ids=str)
async def test_a_hint_never_refuses_a_completion(
    attacked: Engine, http: httpx.AsyncClient, prompt: str | list[str]
) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    plain = await http.post("/v1/completions", json=body)
    stream = (await http.post("/prompt_streams", json={"text": "x y"})).json()["id"]
    for named in ("unknown", stream):
        hinted = await http.post("/v1/completions", json={**body, "prompt_stream_id": named})
        assert hinted.status_code == 200, hinted.text
        assert hinted.json()["choices"] == plain.json()["choices"]
    is_used = (await http.get(f"/prompt_streams/{stream}")).status_code == 410
    assert is_used == (prompt in ("x y", ["x y"]))
    await http.delete(f"/prompt_streams/{stream}")


@pytest.mark.slow
async def test_a_text_of_which_the_tokenizer_makes_no_token_is_refused(
    engines: LocalEngines, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "strips"
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    file.write_text(json.dumps(tokenizer))
    async with (
        start_special_engine(engines, folder, has_costs=False) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        for text in (" ", ["a", " "]):
            answer = await http.post("/generate", json=generation({"text": text}))
            assert answer.status_code == 400 and "is empty" in answer.text
        assert (await http.post("/generate", json=generation())).status_code == 200


# No cell of this seed asks for a long answer.
SEED = 43


async def test_a_hundred_hostile_bodies_leave_the_engine_as_it_was(attacked: Engine) -> None:
    dice = random.Random(SEED)
    for route in ROUTES:
        for cell in dice.sample([*cells_of(route)], 8):
            await attacked.attack(cell)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("route", ROUTES, ids=IDS)
async def test_no_hostile_body_leaves_a_trace(attacked: Engine, route: Route) -> None:
    for cell in cells_of(route):
        await attacked.attack(cell)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_no_hostile_body_ends_an_embedding_engine(engines: LocalEngines, model: Any) -> None:
    async with (
        start_special_engine(engines, model, "--is-embedding", has_costs=False) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        attacked = Engine(http, ("/encode", KNOWN_EMBEDDING))
        answer = await attacked.send("/generate", json.dumps(generation()))
        assert answer is not None and answer.status_code == 400, answer
        await attacked.check()
        for route in EMBEDDING:
            for cell in cells_of(route):
                await attacked.attack(cell)
