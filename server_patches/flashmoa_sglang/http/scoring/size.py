"""``check_size``: refuses lists before anything is made for each of their entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashmoa_sglang.http.errors import MalformedRequest

if TYPE_CHECKING:
    from flashmoa_sglang.http.streams import Limits


def check_size(
    limits: Limits,
    field: str,
    entries: Sequence[object],
    shared: Sequence[object],
    answers: int = 2,
) -> None:
    """Raise MalformedRequest if a list is too long, or its prompts together would be.

    Args:
        field: the field of the body that has the list, for messages.
        shared: what each entry's prompt has besides the entry, as texts or in JSON's types.
        answers: number of answers that are scored after each prompt.
    """
    count = len(entries)
    repeated = sum(len(str(part)) for part in shared if part) * count
    if count > limits.scored_items:
        problem = (
            f"{field} has {count:,} entries; this server takes at most {limits.scored_items:,}"
        )
    elif answers * count > limits.scores:
        problem = (
            f"{count:,} {field} with {answers:,} candidates each are {answers * count:,} scores; "
            f"this server takes at most {limits.scores:,}"
        )
    elif repeated > limits.repeated_characters:
        problem = (
            f"What all {count:,} {field} share would be {repeated:,} characters in their prompts "
            f"together; this server takes at most {limits.repeated_characters:,}"
        )
    else:
        return
    raise MalformedRequest(f"{problem}. Send several requests.")
