"""Turns queries, documents and labels into prompts whose next tokens are the answer.

The prompts of a list begin with everything that they have in common, because the engine computes a
common beginning once. Bodies have the fields of SGLang, Cohere and Jina, and some more. Any other
field is ignored, as these services do, since clients send fields that mean nothing here.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import Field, StrictInt, StrictStr

from flashmoa_sglang.http.bodies import Prompt, Target
from flashmoa_sglang.http.errors import CandidateRefused, MalformedRequest, shown

if TYPE_CHECKING:
    from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer

Tokens = list[StrictInt]
Candidate = str | list[int]
RELEVANT = "Judge whether the document is relevant to the query."
RELEVANT_QUESTION = "Is the document relevant? Answer Yes or No."
LABEL = "Which of these labels fits the text best?"
LABEL_QUESTION = "Answer with the letter of one label."
_LETTERS = string.ascii_uppercase
# SGLang, too, recognises chat templates of rerankers by these words, as Qwen3-Reranker's.
_RERANKER = ("answer can only be", '"yes"', '"no"')
# Chat templates of vision rerankers have these words, and read no messages.
_SEES = ("<|vision_start|>", "<|image_pad|>")
# A model that thinks first would not answer with its next token.
_NO_THOUGHTS = {"enable_thinking": False}
# Number of the prompt's last tokens that are tokenised together with a candidate. As a rule only
# the last word matters. Decoded and tokenised again, the last quarter must be the same tokens.
_TAIL_TOKENS = 16
# A candidate with more characters is tokenised again for each prompt.
SHORT_CANDIDATE = 256
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
    """A request with a list of items. With ``stream``, each result is an event of its own."""

    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreBody(ListBody, extra="allow"):
    """Asks how likely candidates follow each prompt: the query, or the messages, with an item.

    The candidates are ``label_token_ids``, as in SGLang's route, or ``candidates`` of any length.
    ``prompt_stream_id`` names the prompt stream that has the beginning of the only prompt. Several
    prompts use no stream.
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
        """Raise MalformedRequest for fields that exclude each other, or only SGLang's route has."""
        for names in (("query", "messages"), ("label_token_ids", "candidates")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                text = f"Give exactly one of {', '.join(names)}; got {given or 'none'}."
                raise MalformedRequest(text)
        if self.item_first and self.messages is not None:
            raise MalformedRequest("item_first goes with query only; leave it out with messages.")
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

    The query and each document are a text, or an object with a ``text``. Voyage and SGLang's router
    call ``top_n`` ``top_k``. vLLM's clients ask for all documents with 0.
    """

    query: StrictStr | dict[str, Any]
    documents: list[StrictStr | dict[str, Any]]
    top_n: StrictInt | None = Field(default=None, ge=0)
    top_k: StrictInt | None = Field(default=None, ge=0)
    return_documents: bool | None = None
    max_tokens_per_doc: StrictInt | None = Field(default=None, ge=1)
    instruct: StrictStr | None = None

    @property
    def best(self) -> int | None:
        """Number of the best documents in the answer; ``None``: all."""
        return self.top_n or self.top_k or None


class ClassifyBody(ListBody):
    """Asks which of some labels fits each text."""

    input: StrictStr | list[StrictStr]
    labels: list[StrictStr]
    instruct: StrictStr | None = None

    @property
    def inputs(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


@dataclass(frozen=True, slots=True)
class Question:
    """The prompts of a list, and the answers that are scored after each prompt.

    Attributes:
        field: the name of the list in the body, for messages.
        may_repeat: whether several answers may have the same tokens.
    """

    field: str
    prompts: list[Prompt]
    answers: list[Candidate]
    may_repeat: bool = False


def score_question(body: ScoreBody) -> Question:
    """Return the prompts of a /v1/score request: the query or messages, with each item."""
    items = [body.items] if isinstance(body.items, str) else body.items
    candidates: list[Candidate] = list(body.candidates or ())
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
    """Return the text of each document.

    Raises: MalformedRequest if a document has no text.
    """
    return [_text(one, f"documents[{index}]") for index, one in enumerate(body.documents)]


def answered_documents(body: RerankBody) -> list[dict[str, Any]] | None:
    """Return the documents in the form of an answer; ``None`` if the answer has no documents."""
    if not body.return_documents:
        return None
    return [one if isinstance(one, dict) else {"text": one} for one in body.documents]


def _text(entry: str | dict[str, Any], name: str) -> str:
    if isinstance(entry, str):
        return entry
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


def classify_question(body: ClassifyBody, template: str) -> Question:
    """Return a prompt for each text, with a letter for each label, and the letters.

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
    asked = [f"{beginning}{text}\n\n{LABEL_QUESTION}" for text in body.inputs]
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


class CandidateTokenizer:
    """Tokenises candidates after prompts. A candidate's tokens depend on the prompt's end alone.

    Args:
        tokenizer: returns the tokenizer, or refuses a candidate of text if there is none.
    """

    def __init__(self, tokenizer: Callable[[], CanonicalTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._after_short_tail = lru_cache(maxsize=4096)(self._after_tail)

    def tokenize(self, prompt: Sequence[int], candidate: Candidate) -> list[int]:
        """Return a candidate's tokens.

        Raises: CandidateRefused if it has no tokens, or cannot follow the prompt.
        """
        tokens = candidate if isinstance(candidate, list) else self._after(prompt, candidate)
        if not tokens:
            raise CandidateRefused(f"The candidate {shown(candidate)} has no tokens; leave it out.")
        return tokens

    def _after(self, prompt: Sequence[int], text: str) -> list[int]:
        """Try longer and longer ends, until the tokenizer makes the end's tokens of its text."""
        for length in (_TAIL_TOKENS, _TAIL_TOKENS**2, len(prompt)):
            is_short = length == _TAIL_TOKENS and len(text) <= SHORT_CANDIDATE
            after = self._after_short_tail if is_short else self._after_tail
            if (tokens := after(tuple(prompt[-length:]), text)) is not None:
                return tokens
            if length >= len(prompt):
                break
        raise CandidateRefused(
            f"The prompt's last tokens {list(prompt[-_TAIL_TOKENS // 4 :])} are not those that the "
            "tokenizer makes of their text; give candidates as token ids."
        )

    def _after_tail(self, tail: tuple[int, ...], text: str) -> list[int] | None:
        """Return the tokens of a text; ``None`` if the tail is not the tokens of its text."""
        tokenizer = self._tokenizer()
        tail_text = tokenizer.decode(tail)
        before = tokenizer.encode(tail_text)
        # The tail's first tokens may differ, since the text before them is missing.
        matching = max(1, min(_TAIL_TOKENS // 4, len(tail) - 2))
        if tuple(before[-matching:]) != tail[-matching:]:
            return None
        return self._cut(text, before, tokenizer.encode(tail_text + text))

    def _cut(self, text: str, before: list[int], whole: list[int]) -> list[int]:
        """Return the tokens of ``whole`` that follow ``before``, the tokens of the prompt's end."""
        if whole[: len(before)] == before:
            return whole[len(before) :]
        pairs = enumerate(zip(before, whole, strict=False))
        first_different = next((index for index, (a, b) in pairs if a != b), len(whole))
        joined = self._tokenizer().decode(whole[first_different:])
        raise CandidateRefused(
            f"The candidate {shown(text)} is tokenised together with the context's end, as "
            f"{shown(joined)}, so it cannot follow this context. Move white space from the "
            "context's end to the candidate's beginning, end the context at the end of a word, or "
            "give token ids."
        )


def refuse_duplicates(candidates: Sequence[Candidate], tokens: Sequence[list[int]]) -> None:
    """Raise CandidateRefused if two candidates are the same tokens."""
    counts = Counter(map(tuple, tokens))
    if len(counts) == len(tokens):
        return
    pairs = zip(candidates, tokens, strict=True)
    same = [candidate for candidate, own in pairs if counts[tuple(own)] > 1]
    raise CandidateRefused(
        f"At least two candidates are the same tokens, among {shown(same)}; give each once."
    )
