"""Force what engines write, token by token, so that their parsers read a text that a test chose."""

import json
from typing import Any

import dill
from pydantic import BaseModel

from flashmoa.engine import EngineClient

# What such an engine is started with.
ARGUMENTS = ("--enable-custom-logit-processor",)
_END = "<|im_end|>"


class _Tokens(BaseModel):
    tokens: list[int]


def _processor() -> str:
    # SGLang's own class cannot be imported beside engines. One of this function is sent by value.
    class Forced:
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for row, given in enumerate(custom_param_list or ()):
                place = given["place"]
                given["place"] = place + 1
                logits[row] = float("-inf")
                logits[row, given["tokens"][min(place, len(given["tokens"]) - 1)]] = 0.0
            return logits

    return json.dumps({"callable": dill.dumps(Forced).hex()})


async def forcing(engine: EngineClient, text: str) -> dict[str, Any]:
    """Return the fields of a request (``extra_body``) whose answer is a text."""
    body = {"prompt": f"{text}{_END}", "add_special_tokens": False}
    tokens = (await engine.ask("POST", "/tokenize", _Tokens, body)).tokens
    return {
        "custom_logit_processor": _processor(),
        "custom_params": {"tokens": tokens, "place": 0},
    }
