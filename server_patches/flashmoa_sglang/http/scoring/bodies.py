"""The bodies of the scoring routes: those of SGLang, Cohere and Jina, and what they lack.

Other fields are ignored, as these services do, since clients send fields that mean nothing here.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictInt, StrictStr

from flashmoa_sglang.http.bodies import Target
from flashmoa_sglang.http.errors import MalformedRequest

Tokens = list[StrictInt]


class ListBody(Target):
    """A request with a list of items.

    ``stream``: whether each result is sent as soon as it is there. ``chat_template_kwargs``:
    arguments of the chat template.
    """

    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreBody(ListBody):
    """Asks how likely candidates follow each prompt: the query, or the messages, with an item.

    The candidates are ``label_token_ids``, as in SGLang's route, or ``candidates`` of any length.
    ``prompt_stream_id`` names the prompt stream that has the beginning of the only prompt.
    """

    query: StrictStr | Tokens | None = None
    messages: list[dict[str, Any]] | None = None
    items: StrictStr | list[StrictStr] | list[Tokens] | None = None
    label_token_ids: Tokens | list[Tokens] | None = None
    candidates: list[StrictStr | Tokens] | None = None
    prompt_stream_id: StrictStr | None = None
    apply_softmax: bool = False
    item_first: bool = False
    embed_override_token_id: Any = None
    query_embed_overrides: Any = None
    item_embed_overrides: Any = None
    return_pooled_hidden_states: Any = None
    temperature: Any = None
    return_token_logprobs: Any = None
    score_extraction_token: Any = None

    @property
    def is_sglangs(self) -> bool:
        """Whether every field is one of SGLang's own route."""
        ours = (self.messages, self.candidates, self.prompt_stream_id)
        ours += (self.cache_salt, self.extra_key, self.lora_path)
        return not self.stream and self.priority is None and all(one is None for one in ours)

    @property
    def needs_sglang(self) -> bool:
        """Whether it has a field that only SGLang's own route handles, in some releases."""
        given = (self.query_embed_overrides, self.item_embed_overrides, self.score_extraction_token)
        return (
            any(one is not None for one in given)
            or bool(self.return_pooled_hidden_states or self.return_token_logprobs)
            or self.temperature not in (None, 1)
            or self.labels != (self.label_token_ids or [])
        )

    @property
    def labels(self) -> Tokens:
        """The labels that all items have; empty if there are none, or each item has its own."""
        return [label for label in self.label_token_ids or () if isinstance(label, int)]

    def check(self) -> None:
        """Raise MalformedRequest for fields that do not go together."""
        _require_one(self, "query", "messages")
        _require_one(self, "label_token_ids", "candidates")
        if self.item_first and self.messages is not None:
            raise MalformedRequest("item_first goes with query only; leave it out with messages.")
        if self.prompt_stream_id is not None and isinstance(self.items, list) and self.items[1:]:
            raise MalformedRequest("prompt_stream_id goes with one prompt; give one item or none.")
        if not (self.candidates or self.label_token_ids):
            raise MalformedRequest("Give at least one candidate.")


class RerankBody(ListBody):
    """Asks how relevant documents are to a query, in the form of Cohere, Jina and SGLang.

    A document is a text, or an object with a ``text`` or with the fields that ``rank_fields``
    names; the query may be an object with a ``text``, too. Lists are pictures and text, for
    SGLang's own route. ``top_k`` is what Voyage and SGLang's router call ``top_n``; 0, which
    vLLM's clients send, asks for all.
    """

    query: StrictStr | dict[str, Any] | list[Any]
    documents: list[StrictStr | dict[str, Any] | list[Any]]
    top_n: StrictInt | None = Field(default=None, ge=0)
    top_k: StrictInt | None = Field(default=None, ge=0)
    return_documents: bool | None = None
    rank_fields: list[StrictStr] | None = None
    max_tokens_per_doc: StrictInt | None = Field(default=None, ge=1)
    instruct: StrictStr | None = None

    @property
    def best(self) -> int | None:
        """How many of the best documents are answered; ``None``: all."""
        return self.top_n or self.top_k or None

    @property
    def has_pictures(self) -> bool:
        """Whether any part of it may be more than text."""
        return any(isinstance(part, list) for part in (self.query, *self.documents))


class ClassifyBody(ListBody):
    """Asks which of some labels fits each text, in the form of Jina and SGLang."""

    input: StrictStr | list[StrictStr] | list[dict[str, Any]]
    labels: list[StrictStr]
    instruct: StrictStr | None = None


def _require_one(body: ScoreBody, *names: str) -> None:
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise MalformedRequest(f"Give exactly one of {', '.join(names)}; got {given or 'none'}.")
