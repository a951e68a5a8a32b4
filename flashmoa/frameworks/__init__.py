"""Write an adapter: everything that it takes to link the agents of another framework.

An adapter has two parts. Its *client* reports each call of a model: it enters an
:class:`ObservedCall`, sends the id of the prompt stream that this has, passes the pieces of the
answer's text on as they arrive, and finishes it. For a client that is built on OpenAI's,
:func:`flashmoa.openai.observe_completions` with :func:`current_attempts` does all of that but the
last, if its requests are made within :meth:`ObservedCall.making`. Its *planner*, a
:class:`LinkPlanner`, says who may call next (``upcoming``), and what such an agent will send
(``expect``): mostly by a dry run of the framework's own code up to its request, with
:class:`Placeholders` where texts will be.
``examples/own_framework.py`` is an example; :mod:`flashmoa.frameworks.conformance` tests adapters.

**Which object tells the planner of a call?** The one that ``LinkPlanner.begin`` returns. Give it to
an :class:`ObservedCall`, which notifies it: of text, of the end, and of a failure if it is left
without ``finish``, as by a cancelled call. Several planners may observe one call.

**When do others not get a text as it is written?** There are three places to say so:

- ``CallRequest.hold_reason`` before the call, if others read something else than its text: the
  framework rewrites it. It is passed on when it is complete;
- ``begin(rewritten=...)`` before the call, if they never read the model's own text;
- ``CallResult.is_forwarded=False`` after it, if they do not read this one: it is a tool call. Links
  take the text back.

**How is a whole answer heard while it is written?** Give ``CallRequest.client``, and make the
request within :meth:`ObservedCall.making` on an observed client of OpenAI. The engine's plugin then
tells the text on a channel; the request and its answer stay as they are.

**How does a run end?** ``is_running`` turns false, which the planner polls while there were calls;
then ``run_ended`` ends the links. An adapter that knows of the end calls ``end_all``, and whoever
closes the link awaits ``host.close()``: after that, the engines have their KV back.

**Is a planner per run or per team?** A planner plans one run at a time. A team that runs once at a
time has one for all its runs; for runs at the same time, each has its own. They can share a
:class:`Report`.

**Which turns are upcoming?** All that may follow the caller's, the likeliest first, since links are
made in this order; not the caller's own next turn, whose prompt is mostly in the engine's cache.
``Turn.after`` names the agents whose texts come before, beginning with those that write now. A turn
that need not come has ``sure=False``, and a share of the KV pool.

**When is a request predicted again?** When ``ExpectedRequest.holds`` says that the link's prompt is
not right any more, by default never. It is given the prompt so far and the turn as expected now.
That a text in the prompt has been written is no reason; an unexpected message is one.
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
from flashmoa.link.linked_call import LinkedCall
from flashmoa.link.linked_team import LinkedTeam, LinkedTeams, listen_for
from flashmoa.link.options import LinkOptions, LinkSettings
from flashmoa.link.planner import LinkPlanner
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
