"""Turns queries, documents and labels into prompts whose next token is the answer.

Whatever the prompts of a list have in common comes first in them, because the engine computes a
common beginning once. Bodies are those of SGLang, Cohere and Jina, and have what they lack. Other
fields are ignored, as these services do, since clients send fields that mean nothing here.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, StrictInt, StrictStr

from flashmoa_sglang.http.bodies import Prompt, Target
from flashmoa_sglang.http.errors import MalformedRequest

Tokens = list[StrictInt]
RELEVANT = "Judge whether the document is relevant to the query."
RELEVANT_QUESTION = "Is the document relevant? Answer Yes or No."
LABEL = "Which of these labels fits the text best?"
LABEL_QUESTION = "Answer with the letter of one label."
_LETTERS = string.ascii_uppercase
# By these words SGLang, too, recognises templates of rerankers such as Qwen3-Reranker.
_RERANKER = ("answer can only be", '"yes"', '"no"')
# And by these, templates of rerankers that see, which read no messages.
_SEES = ("<|vision_start|>", "<|image_pad|>")
# A model that thinks first would not answer with its next token.
_NO_THOUGHTS = {"enable_thinking": False}
# Fields of /v1/score that only SGLang's own route handles, in some releases.
_OF_SGLANG = (
    "query_embed_overrides",
    "item_embed_overrides",
    "return_pooled_hidden_states",
    "return_token_logprobs",
    "score_extraction_token",
    "temperature",
)


class ListBody(Target):
    """A request with a list of items.

    ``stream``: whether each result is sent as soon as it is there. ``chat_template_kwargs``:
    arguments of the chat template.
    """

    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreBody(ListBody, extra="allow"):
    """Asks how likely candidates follow each prompt: the query, or the messages, with an item.

    The candidates are ``label_token_ids``, as in SGLang's route, or ``candidates`` of any length.
    ``prompt_stream_id`` names the prompt stream that has the beginning of the only prompt.
    """

    query: StrictStr | Tokens | None = None
    messages: list[dict[str, Any]] | None = None
    items: StrictStr | list[StrictStr] | list[Tokens] | None = None
    label_token_ids: Tokens | None = None
    candidates: list[StrictStr | Tokens] | None = None
    prompt_stream_id: StrictStr | None = None
    apply_softmax: bool = False
    item_first: bool = False

    @property
    def labels(self) -> Tokens:
        return self.label_token_ids or []

    def check(self) -> None:
        """Raise MalformedRequest for fields that do not go together, or are SGLang's alone."""
        for names in (("query", "messages"), ("label_token_ids", "candidates")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                text = f"Give exactly one of {', '.join(names)}; got {given or 'none'}."
                raise MalformedRequest(text)
        if self.item_first and self.messages is not None:
            raise MalformedRequest("item_first goes with query only; leave it out with messages.")
        prompts = len(self.items) if isinstance(self.items, list) else 1
        if self.prompt_stream_id is not None and prompts != 1:
            raise MalformedRequest(
                f"prompt_stream_id goes with one prompt, not with {prompts}; leave items out, or "
                "give one."
            )
        if not (self.candidates or self.label_token_ids):
            raise MalformedRequest("Give at least one candidate.")
        others = self.model_extra or {}
        for name in _OF_SGLANG:
            value = others.get(name)
            if value is not None and value is not False and (name, value) != ("temperature", 1):
                raise MalformedRequest(
                    f"Only SGLang's own route has {name}; start the engine with --flashmoa-scoring "
                    "off to have it answer."
                )


class RerankBody(ListBody):
    """Asks how relevant documents are to a query, in the form of Cohere, Jina and SGLang.

    A document is a text, or an object with a ``text`` or with the fields that ``rank_fields``
    names; the query may be an object with a ``text``, too. ``top_k`` is what Voyage and SGLang's
    router call ``top_n``; 0, which vLLM's clients send, asks for all.
    """

    query: StrictStr | dict[str, Any]
    documents: list[StrictStr | dict[str, Any]]
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


class ClassifyBody(ListBody):
    """Asks which of some labels fits each text, in the form of Jina and SGLang."""

    input: StrictStr | list[StrictStr] | list[dict[str, Any]]
    labels: list[StrictStr]
    instruct: StrictStr | None = None

    @property
    def inputs(self) -> list[str] | list[dict[str, Any]]:
        return [self.input] if isinstance(self.input, str) else self.input


@dataclass(frozen=True, slots=True)
class Question:
    """The prompts of a list, and the answers that are scored after each of them.

    Attributes:
        field: the field of the body that has the list, for messages.
        may_repeat: whether answers may be the same tokens.
    """

    field: str
    prompts: list[Prompt]
    answers: list[str | list[int]]
    may_repeat: bool = False


def score_question(body: ScoreBody) -> Question:
    """Return the prompts of a /v1/score request: each item with what all of them share."""
    items = [body.items] if isinstance(body.items, str) else body.items
    candidates: list[str | list[int]] = list(body.candidates or ())
    candidates += [[token] for token in body.labels]
    # Without items, the query itself is the only prompt.
    prompts = [_score_prompt(body, item) for item in ([None] if items is None else items)]
    return Question("items", prompts, candidates, may_repeat=body.candidates is None)


def _score_prompt(body: ScoreBody, item: str | list[int] | None) -> Prompt:
    if body.messages is not None:
        messages = body.messages if item is None else _append(body.messages, item)
        return Prompt(messages=messages, chat_template_kwargs=body.chat_template_kwargs)
    if item is None:
        item = "" if isinstance(body.query, str) else []
    parts: Any = [body.query, item]
    if type(parts[0]) is not type(parts[1]):
        raise MalformedRequest("query and items must both be text, or both be token ids.")
    whole = parts[1] + parts[0] if body.item_first else parts[0] + parts[1]
    return Prompt(text=whole) if isinstance(whole, str) else Prompt(input_ids=whole)


def _append(messages: list[dict[str, Any]], item: str | list[int]) -> list[dict[str, Any]]:
    """Return the messages with an item at the end of the user's last message."""
    if not isinstance(item, str):
        raise MalformedRequest("With messages, items must be text.")
    *before, last = messages or [{}]
    if last.get("role") != "user":
        return [*messages, {"role": "user", "content": item}]
    content: Any = last.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": item}]
    else:
        content = f"{content or ''}{item}"
    return [*before, {**last, "content": content}]


def document_texts(body: RerankBody) -> list[str]:
    """Return the text of each document. Raises: MalformedRequest if one has none."""
    return [
        _text(document, f"documents[{index}]", body.rank_fields)
        for index, document in enumerate(body.documents)
    ]


def answered_documents(body: RerankBody) -> list[dict[str, Any]] | None:
    """Return the documents in the form of an answer; ``None`` if it has none."""
    if not body.return_documents:
        return None
    return [one if isinstance(one, dict) else {"text": one} for one in body.documents]


def input_texts(body: ClassifyBody) -> list[str]:
    """Return the texts to classify. Raises: MalformedRequest if an input has none."""
    return [_text(one, f"input[{index}]") for index, one in enumerate(body.inputs)]


def _text(entry: Any, name: str, fields: Sequence[str] | None = None) -> str:
    if isinstance(entry, str):
        return entry
    if fields:
        if not any(field in entry for field in fields):
            raise MalformedRequest(f"{name} has none of the rank_fields {', '.join(fields)}.")
        named = dict.fromkeys(field for field in fields if field in entry)
        return "\n".join(f"{field}: {entry[field]}" for field in named)
    if not isinstance(text := entry.get("text"), str):
        raise MalformedRequest(f'{name} has no text; give a text, or an object with a "text".')
    return text


def rerank_question(body: RerankBody, documents: Sequence[str], template: str) -> Question:
    """Return a prompt for each document, and the answers for and against it.

    Args: template: the model's chat template; empty if it has none.

    Raises: MalformedRequest if the query is empty, or the template reads no messages.
    """
    query = _text(body.query, "query")
    if not query.strip():
        raise MalformedRequest("Give a query that is not empty.")
    if all(words in template.lower() for words in _RERANKER):
        if any(word in template for word in _SEES):
            raise MalformedRequest(
                "Only SGLang's own route asks rerankers that see; start the engine with "
                "--flashmoa-scoring off to have it answer."
            )
        instruct = {"instruct": body.instruct} if body.instruct else {}
        template_args = {**instruct, **(body.chat_template_kwargs or {})}
        prompts = [
            Prompt(
                messages=[{"role": "user", "content": text} for text in (query, document)],
                chat_template_kwargs=template_args or None,
            )
            for document in documents
        ]
        return Question("documents", prompts, ["yes", "no"])
    beginning = f"{body.instruct or RELEVANT}\n\nQuery: {query}\n\nDocument: "
    texts = [f"{beginning}{document}\n\n{RELEVANT_QUESTION}" for document in documents]
    return _ask("documents", texts, ["Yes", "No"], template, body.chat_template_kwargs)


def classify_question(body: ClassifyBody, texts: Sequence[str], template: str) -> Question:
    """Return a prompt for each text, in which the labels have letters, and the letters.

    Raises: MalformedRequest if there are more labels than letters, or fewer than two, or the same
        label twice.
    """
    count = len(body.labels)
    if not 2 <= count <= len(_LETTERS) or len(set(body.labels)) < count:
        raise MalformedRequest(
            f"labels must be 2 to {len(_LETTERS)} different texts, not {count} with "
            f"{len(set(body.labels))} different ones; score the labels' texts with /v1/score."
        )
    letters = _LETTERS[:count]
    listed = "\n".join(
        f"{letter}. {label}" for letter, label in zip(letters, body.labels, strict=True)
    )
    beginning = f"{body.instruct or LABEL}\n\n{listed}\n\nText: "
    asked = [f"{beginning}{text}\n\n{LABEL_QUESTION}" for text in texts]
    return _ask("input", asked, list(letters), template, body.chat_template_kwargs)


def _ask(
    field: str,
    texts: Sequence[str],
    answers: Sequence[str],
    template: str,
    template_args: Mapping[str, Any] | None,
) -> Question:
    """Ask as the user of a chat; without a chat template, as text that the answer continues."""
    if not template:
        prompts = [Prompt(text=f"{text}\nAnswer:") for text in texts]
        return Question(field, prompts, [f" {answer}" for answer in answers])
    template_args = {**_NO_THOUGHTS, **(template_args or {})}
    prompts = [
        Prompt(messages=[{"role": "user", "content": text}], chat_template_kwargs=template_args)
        for text in texts
    ]
    return Question(field, prompts, list(answers))
