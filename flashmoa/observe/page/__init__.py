"""A run as one HTML file that loads nothing and needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from flashmoa.observe.events import Event
from flashmoa.observe.page.run import run

_SCRIPTS = ("format.js", "card.js", "layout.js", "chart.js", "view.js", "page.js")


def page(events: Sequence[Event], title: str) -> str:
    """An HTML document of a run's events; ``title`` heads it.

    Agents' names and texts are whatever users and models wrote: they are data of a script
    element that cannot be closed from within, put on the page as text only, and the page's
    policy runs no script but its own (Content Security Policy Level 3, hashes).
    """
    script = "\n".join(['"use strict";', *(_part(name) for name in _SCRIPTS)])
    style = _part("page.css")
    return Template(_part("template.html")).substitute(
        title=escape(title),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        style=style,
        script=script,
        run=_inert(json.dumps(run(events), separators=(",", ":"))),
    )


def _part(name: str) -> str:
    return files("flashmoa.observe.page").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _inert(text: str) -> str:
    """JSON within a script element: nothing in it ends the element or begins a comment."""
    return text.replace("<", "\\u003c")
