"""Keep what stands in a run for each text of an earlier one (:class:`KnownTexts`). No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoa.linking.learned_prompts import predict
from flashmoa.linking.learned_strings import TextFinder


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text of the earlier run was: it is an answer, or the id of a call of a tool.

    Attributes:
        key: the key of the call that was answered with it.
        is_stripped: whether it is the answer without the white space around it.
        number: that of the call of a tool; ``None`` if the text is an answer.
    """

    key: str
    is_stripped: bool = False
    number: int | None = None


class KnownTexts:
    """Replaces the texts of an earlier run by those of this one.

    What stands for a text is looked up when it is met in a string, since far more texts are known
    than there are in a prompt.

    Args:
        answers: the answers of the earlier run, by the keys of its calls.
        call_ids: the ids of the calls of tools in its other answers, likewise.
    """

    def __init__(self, answers: Mapping[str, str], call_ids: Mapping[str, Sequence[str]]) -> None:
        self._places: defaultdict[str, list[_Place]] = defaultdict(list)
        for key, answer in answers.items():
            # Programs often strip an answer.
            self._places[answer.strip()].append(_Place(key, is_stripped=True))
            self._places[answer].append(_Place(key))
        for key, ids in call_ids.items():
            for number, id_ in enumerate(ids):
                self._places[id_].append(_Place(key, number=number))
        # An empty text is everywhere.
        self._places.pop("", None)
        # Texts other than these.
        self._changes: dict[str, str] = {}
        self._finder = TextFinder(self._places)

    def learn(self, changes: Mapping[str, str]) -> None:
        """Note what stands for texts of which nothing is known yet.

        Args:
            changes: see :func:`~flashmoa.linking.learned_prompts.find_changes`.
        """
        for text, now in changes.items():
            self._changes.setdefault(text, now)
        self._finder.add(changes)

    def predict(
        self, value: Any, texts: Mapping[str, str], find_ids: Callable[[str], Sequence[str]]
    ) -> Any:
        """Return a JSON value of the earlier run as it is likely to be in this one.

        Args:
            texts: by key, what stands for the answers of the earlier run.
            find_ids: returns the ids of the calls of tools in the answer to the call with a key.
        """

        def stands_for(text: str) -> str | None:
            # Several calls may have had the same answer; the last that is known counts.
            for place in reversed(self._places.get(text, ())):
                if place.number is not None:
                    ids = find_ids(place.key)
                    if place.number < len(ids):
                        return ids[place.number]
                elif place.key in texts:
                    now = texts[place.key]
                    return now.strip() if place.is_stripped else now
            return self._changes.get(text)

        return predict(value, stands_for, self._finder)
