"""The answers of the scoring routes, in the forms of SGLang, Cohere and Jina.

Each form builds an answer from three parts: ``item`` about one item, ``whole`` about all items in
the order of the request, and ``rest`` about the request itself. The usage is added to ``rest``.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashmoa_sglang.http.client_requests import StreamRequest
from flashmoa_sglang.http.scoring.forwards import ScoredPrompt


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """SGLang's /v1/score, and ``results`` with the log-probabilities of each item.

    Attributes:
        softmax: whether an item's scores add up to 1; otherwise they are probabilities.
        with_tokens: whether the answer has the tokens that the engine has made of candidates.
    """

    model: str
    softmax: bool
    with_tokens: bool

    def item(self, prompt: ScoredPrompt) -> dict[str, Any]:
        logprobs = prompt.logprobs
        result: dict[str, Any] = {
            "index": prompt.index,
            "scores": softmax(logprobs) if self.softmax else [math.exp(one) for one in logprobs],
            # JSON has no number for infinity.
            "logprobs": [one if math.isfinite(one) else None for one in logprobs],
            "prefills": prompt.computed,
            "prompt_tokens": prompt.prompt_tokens,
            "computed_tokens": prompt.prompt_tokens - prompt.cached_tokens,
        }
        return result | ({"candidate_tokens": prompt.candidates} if self.with_tokens else {})

    def rest(self) -> dict[str, Any]:
        return {"object": "scoring", "model": self.model}

    def whole(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"scores": [item["scores"] for item in items], "results": list(items)}


@dataclass(frozen=True, slots=True)
class RerankForm:
    """The answer of Cohere's and Jina's rerankers.

    Attributes:
        top_n: number of the best documents in the answer; ``None``: all.
        documents: the documents in the form of the answer; ``None``: the answer has none.
    """

    model: str
    top_n: int | None
    documents: Sequence[dict[str, Any]] | None

    def item(self, prompt: ScoredPrompt) -> dict[str, Any]:
        index = prompt.index
        result: dict[str, Any] = {"index": index, "relevance_score": softmax(prompt.logprobs)[0]}
        return result | ({"document": self.documents[index]} if self.documents is not None else {})

    def rest(self) -> dict[str, Any]:
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": self.model}

    def whole(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ranked = sorted(items, key=lambda item: item["relevance_score"], reverse=True)
        return {"results": ranked[: self.top_n]}


@dataclass(frozen=True, slots=True)
class ClassifyForm:
    """SGLang's answer of /v1/classify, and the ``mass``."""

    model: str
    labels: Sequence[str]

    def item(self, prompt: ScoredPrompt) -> dict[str, Any]:
        shares = softmax(prompt.logprobs)
        best = max(range(len(shares)), key=shares.__getitem__)
        return {
            "index": prompt.index,
            "label": self.labels[best],
            "probs": shares,
            "num_classes": len(shares),
            # The share of the model's probability that the letters of all labels have together.
            "mass": math.fsum(map(math.exp, prompt.logprobs)),
        }

    def rest(self) -> dict[str, Any]:
        name = f"classify-{uuid.uuid4().hex}"
        return {"id": name, "object": "list", "created": int(time.time()), "model": self.model}

    def whole(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"data": list(items)}


Form = ScoreForm | RerankForm | ClassifyForm


def usage_fields(prompts: Sequence[ScoredPrompt], stream: StreamRequest | None) -> dict[str, Any]:
    """Return the usage in OpenAI's form, the number of prefills, and how a stream was used."""
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    details: dict[str, Any] = {"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)}
    fields: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": details,
        "prefills": sum(prompt.computed for prompt in prompts),
    }
    if stream is not None and stream.usage is not None:
        details["streamed_tokens"] = stream.usage["streamed_tokens"]
        fields["prompt_stream"] = stream.usage["prompt_stream"]
    return fields


def softmax(logprobs: Sequence[float]) -> list[float]:
    """Scale probabilities so that they add up to 1. If all are zero, return equal ones."""
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
