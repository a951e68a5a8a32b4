"""Write an adapter that links the agents of another framework.

An adapter has two parts.

- The *client* reports each call of a model. It enters an :class:`ObservedCall`, sends the id of its
  prompt stream with the request, passes on the answer's text as it arrives, and finishes the call.
  For a client that is built on OpenAI's, :func:`flashmoa.openai.observe_completions` with
  :func:`current_attempts` does all of this but the last step; the client makes its requests within
  :meth:`ObservedCall.making`.
- The *planner*, a :class:`LinkPlanner`, says which agents may call next (``upcoming``) and what
  such an agent will send (``expect``). Mostly, a dry run of the framework's code up to its request
  shows it, with :class:`Placeholders` in place of texts that are still being written.

``examples/own_framework.py`` is an example; :mod:`flashmoa.frameworks.conformance` tests adapters.

**Which object tells the planner of a call?** The object that ``LinkPlanner.begin`` returns. Give it
to an :class:`ObservedCall`, which notifies it of text and of the end. A call that is left without
``finish``, for instance because it was cancelled, has failed. Several planners may observe a call.

**When do others not get a text as it is written?** Say so in one of three places:

- before the call, ``CallRequest.hold_reason``: others read another text, because the framework
  rewrites the model's text. The call's text is passed on when it is complete;
- before the call, ``begin(rewritten=...)``: others never read the model's own text;
- after the call, ``CallResult.is_forwarded=False``: others do not read this text, as it is a tool
  call. Links remove the text again.

**How is a whole answer heard while it is written?** Give ``CallRequest.client``, and make the
request within :meth:`ObservedCall.making` on an observed client of OpenAI. The engine's plugin
sends the text on a channel; the request and its answer stay as they are.

**How does a run end?** After calls, the planner polls ``is_running``; when it is false,
``run_ended`` ends the links. An adapter that knows the end calls ``end_all``. Closing a link awaits
``host.close()``; after that, the engines have their KV back.

**Is a planner per run or per team?** A planner plans one run at a time. A team whose runs follow
each other has one planner. Runs at the same time have a planner each; they can share a
:class:`Report`.

**Which turns are upcoming?** All turns that may follow the caller's, the likeliest first, because
links are made in this order. Leave out the caller's own next turn: the engine's cache has most of
its prompt. ``Turn.after`` names the agents whose texts come before, first the agents that write
now. A turn that may not come has ``sure=False``; such turns get only a share of the KV pool.

**When is a request predicted again?** When ``ExpectedRequest.holds`` returns false; by default it
never does. Its arguments are the link's prompt so far and the turn as expected now. It is true
while expected texts are written, and false when a message has come that was not expected.
"""

from flashmoa.engine import EngineClient
from flashmoa.link.after_tools import RequestAfterTools
from flashmoa.link.calls import (
    CallObserver,
    CallRequest,
    CallResult,
    ObservedCall,
    current_attempts,
)
from flashmoa.link.expected import (
    ChatRequest,
    ExpectedRequest,
    RequestCaptured,
    Turn,
    first_request,
)
from flashmoa.link.link import Link
from flashmoa.link.linked_team import LinkedTeam, LinkedTeams, listen_for
from flashmoa.link.options import LinkOptions, LinkSettings
from flashmoa.link.planner import LinkedCall, LinkPlanner
from flashmoa.link.prompt import NotForecastable, Placeholders, Prompt, Slot
from flashmoa.observe.report import Report
from flashmoa.observe.trace import end_trace

__all__ = [
    "CallObserver",
    "CallRequest",
    "CallResult",
    "ChatRequest",
    "EngineClient",
    "ExpectedRequest",
    "Link",
    "LinkOptions",
    "LinkPlanner",
    "LinkSettings",
    "LinkedCall",
    "LinkedTeam",
    "LinkedTeams",
    "NotForecastable",
    "ObservedCall",
    "Placeholders",
    "Prompt",
    "Report",
    "RequestAfterTools",
    "RequestCaptured",
    "Slot",
    "Turn",
    "current_attempts",
    "end_trace",
    "first_request",
    "listen_for",
]
