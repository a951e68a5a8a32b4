"""Score answers on servers without the plugin's scoring routes (:class:`LabelScorer`).

SGLang's own ``/v1/score`` and vLLM's ``/generative_scoring`` return the probabilities of single
tokens after each prompt of a list. With ``--enable-mis``, SGLang computes the list in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import anyio
from pydantic import BaseModel

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient
from flashmoa.engine.plain import Models
from flashmoa.engine.refusals import Answer
from flashmoa.engine.wire import PromptTokens
from flashmoa.errors import PluginMissing, PromptTooLarge
from flashmoa.scoring.contexts import (
    Candidate,
    CandidateRefused,
    Context,
    append_item,
    context_kind,
)
from flashmoa.scoring.scores import ItemScores


class _Probabilities(BaseModel):
    scores: list[list[float]]


class _FirstLabel(BaseModel):
    index: int
    score: float


class _FirstLabels(BaseModel):
    data: list[_FirstLabel]

    def in_order(self) -> list[float]:
        return [one.score for one in sorted(self.data, key=lambda one: one.index)]


class LabelScorer:
    """Scores candidates by the probabilities of single tokens.

    The server tokenises, and renders messages (``/tokenize``, ``/detokenize``).

    Args:
        owner: the server's kind, as its list of models tells: ``sglang`` or ``vllm``.
        limit: is held while a request for scores runs.
    """

    def __init__(self, engine: EngineClient, owner: str, limit: anyio.Semaphore) -> None:
        self._engine = engine
        self._limit = limit
        self._is_vllm = owner == "vllm"

    @classmethod
    async def connect(cls, engine: EngineClient, limit: anyio.Semaphore) -> LabelScorer | None:
        """Ask a server what it is. Return ``None`` if it has no route for scores.

        Raises: PluginMissing if the route would ignore the client's namespace.
        """
        models = await engine.ask("GET", "/v1/models", Models)
        owner = next((name for name in ("sglang", "vllm") if name in models.owners), None)
        if owner is None:
            return None
        # vLLM's route takes the name of a model. SGLang's ignores it.
        ignored = [name for name in engine.namespace if owner == "sglang" or name != "model"]
        if ignored:
            advice = "leave these out"
            if owner == "sglang":
                advice = f"start the server with the flashmoa-sglang plugin, or {advice}"
            raise PluginMissing(
                f"the scoring route of {engine.url} ignores {', '.join(ignored)}; {advice}"
            )
        return cls(engine, owner, limit)

    async def score(
        self,
        context: Context,
        items: Sequence[str] | None,
        candidates: Sequence[Candidate],
        template_args: Mapping[str, Any] | None,
    ) -> list[ItemScores]:
        """Score candidates after the context with each item, or after the context alone.

        A candidate of several tokens has one prompt for each of its tokens.

        Raises:
            CandidateRefused: if a candidate cannot follow its context.
            EngineError: if the server cannot tokenise or score a prompt.
        """
        contexts = [context] if items is None else [append_item(context, item) for item in items]
        read = [await self._read(one, candidates, template_args) for one in contexts]
        follows = [_labels_after_heads(tokens) for _, tokens in read]
        prompts = [
            [*ids, *head] for (ids, _), own in zip(read, follows, strict=True) for head in own
        ]
        labels = [[*after] for own in follows for after in own.values()]
        rows = iter(await self._probabilities(prompts, labels))
        scored: list[ItemScores] = []
        for (ids, tokens), own in zip(read, follows, strict=True):
            likely = {head: next(rows) for head in own}
            # vLLM computes a prompt once for each label.
            repeats = {head: len(after) if self._is_vllm else 1 for head, after in own.items()}
            prompt_tokens = sum((len(ids) + len(head)) * repeats[head] for head in own)
            scored.append(
                ItemScores(
                    logprobs=[
                        math.fsum(_log(likely[tuple(one[:at])][one[at]]) for at in range(len(one)))
                        for one in tokens
                    ],
                    candidate_tokens=tokens,
                    prefills=sum(repeats.values()),
                    prompt_tokens=prompt_tokens,
                    computed_tokens=prompt_tokens,
                )
            )
        return scored

    async def _read(
        self,
        context: Context,
        candidates: Sequence[Candidate],
        template_args: Mapping[str, Any] | None,
    ) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a context, and each candidate's tokens after it."""
        kind, text, ids = context_kind(context), "", list[int]()
        if kind == "tokens":
            ids = list(cast("Sequence[int]", context))
            if any(isinstance(one, str) for one in candidates):
                text = await self._engine.detokenize(ids)
        elif kind == "text":
            text = cast("str", context)
        else:
            fields = {"chat_template_kwargs": template_args} if template_args else {}
            text = await self._engine.plain.render(cast("Any", context), fields)
        # Rendered messages and texts of token ids contain the special tokens already.
        tokenize = partial(self._tokenize, add_special_tokens=kind == "text")
        ids = ids or await tokenize(text)
        if not ids:
            raise CandidateRefused("the context is empty; give a text that candidates can follow")
        tokens: list[list[int]] = []
        for candidate in candidates:
            if isinstance(candidate, str):
                whole = await tokenize(text + candidate)
                if whole[: len(ids)] != ids:
                    raise CandidateRefused(
                        f"the candidate {candidate!r} is tokenised together with the context's "
                        "end; move white space from the context's end to the candidate's "
                        "beginning, or give token ids"
                    )
                tokens.append(whole[len(ids) :])
            else:
                tokens.append(list(candidate))
            if not tokens[-1]:
                raise CandidateRefused(f"the candidate {candidate!r} has no tokens; give a text")
            if tokens[-1] in tokens[:-1]:
                raise CandidateRefused(
                    f"the candidate {candidate!r} has the same tokens as another; give each once"
                )
        return ids, tokens

    async def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return (await self._engine.ask("POST", "/tokenize", PromptTokens, body)).tokens

    async def _probabilities(
        self, prompts: Sequence[list[int]], labels: Sequence[Sequence[int]]
    ) -> list[dict[int, float]]:
        """Return the probability of each of its labels after each prompt."""
        # SGLang's multi-item scoring needs items that are not empty.
        pairs = zip(min(prompts), max(prompts), strict=False)
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), math.inf)
        shared = int(min(shared, *(len(prompt) - 1 for prompt in prompts)))
        query, items = prompts[0][:shared], [prompt[shared:] for prompt in prompts]
        body: dict[str, Any] = {"query": query, "apply_softmax": False}
        found: list[dict[int, float]] = [{} for _ in prompts]
        after: dict[int, list[int]] = {}
        for place, own in enumerate(labels):
            for label in own:
                after.setdefault(label, []).append(place)
        if not self._is_vllm:
            all_items = {**body, "items": items}
            answer = await self._ask("/v1/score", _Probabilities, all_items, [*after])
            return [dict(zip(after, row, strict=True)) for row in answer.scores]
        model = await self._engine.plain.model()
        longest, room = max(map(len, prompts)), await self._engine.context_length(model)
        if room is not None and longest >= room:  # vLLM would cut the prompt without a word.
            text = f"a prompt has {longest} tokens, and the context has room for {room - 1}"
            raise PromptTooLarge(f"{text}; shorten it", 400, "too_large")

        async def ask(label: int) -> None:
            """Ask for a label after the prompts that it may follow: an answer has one label."""
            own = {**body, "model": model, "items": [items[place] for place in after[label]]}
            answer = await self._ask("/generative_scoring", _FirstLabels, own, [label])
            for place, probability in zip(after[label], answer.in_order(), strict=True):
                found[place][label] = probability

        first, *others = after
        await ask(first)  # It leaves the shared part in the prefix cache for the others.
        await all_of([partial(ask, label) for label in others])
        return found

    async def _ask(
        self, path: str, kind: type[Answer], body: Mapping[str, Any], labels: list[int]
    ) -> Answer:
        async with self._limit:
            return await self._engine.ask("POST", path, kind, {**body, "label_token_ids": labels})


def _labels_after_heads(
    candidates: Sequence[Sequence[int]],
) -> dict[tuple[int, ...], dict[int, None]]:
    """Return each beginning of a candidate, with the tokens that follow it in candidates."""
    found: dict[tuple[int, ...], dict[int, None]] = {}
    for one in candidates:
        for end, token in enumerate(one):
            found.setdefault(tuple(one[:end]), {})[token] = None
    return found


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf
