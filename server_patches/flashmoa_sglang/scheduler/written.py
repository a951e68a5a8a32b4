"""``WrittenAnswers``: tells the HTTP process the tokens of running answers.

Only requests that a client hears are told. SGLang still sends each answer when it is complete: the
request has no mark, and its answer takes SGLang's own way.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import WrittenTokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashmoa_sglang.messages import HearAnswers


class WrittenAnswers:
    """The heard requests of a scheduler, each with its number of told tokens.

    Args: slowdown: factor of the interval between messages, for a slowed down modelled GPU.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._told: dict[str, int] = {}
        self._interval_seconds = 0.025 * slowdown
        self._next = 0.0

    def hear(self, message: HearAnswers) -> None:
        for rid in message.begun:
            self._told.setdefault(rid, 0)
        for rid in message.ended:
            self._told.pop(rid, None)

    def news(self, reqs: Iterable[Any], now: float) -> WrittenTokens | None:
        """Return the untold tokens of a forward's requests; ``None`` if there is nothing to tell.

        The last tokens of a request come with its answer.

        Args: now: seconds, of any one clock.
        """
        if not self._told or now < self._next:
            return None
        answers = [self._tell(req) for req in reqs if self._has_news(req)]
        if not answers:
            return None
        self._next = now + self._interval_seconds
        return WrittenTokens(tuple(answers))

    def _has_news(self, req: Any) -> bool:
        told = self._told.get(req.rid)
        if told is None or told >= len(req.output_ids) or req.finished():
            return False
        # SGLang's own streaming also delays text that may become a stop string.
        return not req.check_match_stop_str_prefix()

    def _tell(self, req: Any) -> tuple[str, bytes, int]:
        told = self._told[req.rid]
        self._told[req.rid] = len(req.output_ids)
        # SGLang detokenises an answer together with the last five tokens of its prompt.
        before = req.origin_input_ids_unpadded[-5:] if told == 0 else ()
        tokens = array("q", before)
        tokens.extend(req.output_ids[told:])
        return req.rid, tokens.tobytes(), len(before)
