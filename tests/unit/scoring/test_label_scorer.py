"""Scores by the probabilities of single tokens, from a server that has vLLM's or SGLang's route."""

import math
from typing import Any

import anyio
import pytest

from flashmoa.errors import PluginMissing
from flashmoa.scoring.label_scorer import LabelScorer

CONTEXT = [1, 2, 3]


def probability(prompt: list[int], label: int) -> float:
    return ((sum(prompt) * 31 + label * 7) % 97 + 1) / 100


class Engine:
    """A server whose model gives each token the probability of :func:`probability`."""

    url = "http://e"

    def __init__(self, owner: str, namespace: dict[str, str] | None = None) -> None:
        self.namespace = namespace or {}
        self.plain = self
        self.prompts: list[tuple[list[int], list[int]]] = []
        self._owner = owner

    async def model(self) -> str:
        return "m"

    async def context_length(self, _model: str) -> int | None:
        return None

    async def ask(self, _method: str, path: str, kind: Any, body: Any = None) -> Any:
        if path == "/v1/models":
            return kind.model_validate({"data": [{"id": "m", "owned_by": self._owner}]})
        prompts = [[*body["query"], *item] for item in body["items"]]
        labels = body["label_token_ids"]
        self.prompts += [(prompt, labels) for prompt in prompts]
        rows = [[probability(prompt, label) for label in labels] for prompt in prompts]
        if path == "/v1/score":
            return kind.model_validate({"scores": rows})
        data = [{"index": place, "score": row[0]} for place, row in enumerate(rows)]
        return kind.model_validate({"data": data[::-1]})


async def connect(engine: Any) -> LabelScorer:
    found = await LabelScorer.connect(engine, anyio.Semaphore(4))
    assert found is not None
    return found


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
async def test_each_label_is_asked_after_its_own_prompts(owner: str) -> None:
    candidates = [[*range(place, place + 100, 5)] for place in range(5)]
    candidates.append([*candidates[0][:3], 999])
    engine = Engine(owner)
    [scored] = await (await connect(engine)).score(CONTEXT, None, candidates, None)
    for one, logprob in zip(candidates, scored.logprobs, strict=True):
        parts = [math.log(probability([*CONTEXT, *one[:at]], one[at])) for at in range(len(one))]
        assert logprob == pytest.approx(sum(parts))
    pairs = {(tuple(one[:at]), one[at]) for one in candidates for at in range(len(one))}
    heads = {head for head, _ in pairs}
    expected = pairs if owner == "vllm" else heads
    assert scored.prefills == len(engine.prompts) == len(expected)
    assert scored.prompt_tokens == sum(len(prompt) for prompt, _ in engine.prompts)


@pytest.mark.parametrize(("owner", "names_plugin"), [("sglang", True), ("vllm", False)])
async def test_an_ignored_namespace_is_refused(owner: str, names_plugin: bool) -> None:
    with pytest.raises(PluginMissing, match="ignores cache_salt") as refused:
        await connect(Engine(owner, {"cache_salt": "a"}))
    assert ("flashmoa-sglang" in str(refused.value)) == names_plugin
