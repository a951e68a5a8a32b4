"""Say in words, for reports, why a call uses no link (``CallStarted.unlinked``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashmoa.observe.events import LATE

NO_LINKS = "links are off (ahead='nothing')"
NO_PLUGIN = "its engine has no plugin, and nothing of its prompt was prefilled there"
# Of links that are uncertain, so that their prompts may go unused.
NO_PLUGIN_FOR_LIKELY = (
    "its engine has no plugin; only prompts that are sure to come are prefilled there"
)
NO_SHARE = (
    "the share of the KV pool for links that may go unused is taken by agents that are likelier to "
    "speak"
)
OTHER_COURSE = "the conversation took another course than expected"
OWN_TURN = "it spoke again: an agent's own next turn is linked only while its tools run"
UNEXPECTED = "it was not expected to be next"
# Why other agents get a text when it is complete (``LinkWaits.reason``).
UNHEARD = "its engine does not tell what it writes, and its answer is not requested as a stream"

# Sentences for ``LinkClosed.reason``; any other reason is an error.
_ENDED = {
    "too late": LATE,
    "plain engine": NO_PLUGIN,
    "abort": "its link was closed, as a text that it reads failed",
    "mispredicted": OTHER_COURSE,
    "unused": "its link had ended, as no request came in time",
    "closed": "its link was closed",
}


def describe_end(reason: str) -> str:
    """Return why a request does not use a link that has ended for this reason."""
    return _ENDED.get(reason, f"its link failed: {reason}")


@dataclass(frozen=True, slots=True)
class Unlinked:
    """Says why an agent has no link.

    Attributes:
        until: the end of the reason: the agent's next ``call`` or attempt to link it, the end of
            the ``run``, or the next ``prediction`` of its prompt.
    """

    reason: str
    until: Literal["call", "run", "prediction"] = "call"


# The attempt has not ended, or was given up because a writer or another call was faster.
UNFINISHED = Unlinked(LATE)
# The agent has called, and its link was made for another call.
MISPREDICTED = Unlinked(OTHER_COURSE)
# The engine has no plugin, and links are off there.
PLAIN_ENGINE = Unlinked(NO_PLUGIN, "run")
