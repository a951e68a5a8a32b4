"""What a request says of its answer, its priority and its prompt stream, and wrong hints."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.http.hints import Hints, read_hints

STREAM, TOKENS = "X-Request-Id-FlashMoA-Stream", "X-Request-Id-FlashMoA-Tokens"


def with_body(headers: tuple[str, str] | None = None, **body: object) -> Any:
    """Return a client's request with this body, and with a stream and a number in headers."""
    sent = dict(zip((STREAM, TOKENS), headers or (), strict=False))
    return SimpleNamespace(_json=body, state=SimpleNamespace(), headers=sent)


LONG = "x" * 10_000
DEEP: Any = []
for _ in range(975):
    DEEP = [DEEP]


@pytest.mark.parametrize("body", [{"_json": {"messages": []}}, {"_json": [1]}, {}])
def test_headers_count_whatever_the_body_is(body: dict[str, Any]) -> None:
    asked = SimpleNamespace(headers={STREAM: "an id", TOKENS: "70"}, **body)
    assert read_hints(asked) == Hints("an id", 70)


def test_hints_in_the_body_count_before_headers() -> None:
    asked = with_body(("b", "70"), prompt_stream_id="a", nvext={"agent_hints": {"osl": 5}})
    assert read_hints(asked) == Hints("a", 5)
    asked = with_body(("b", "70"), prompt_stream_id=None, expected_output_tokens=0)
    assert read_hints(asked) == Hints("b", 0)


@pytest.mark.parametrize(
    "number", ["", "-1", "2147483648", "9" * 5000, "1.5", "x", "0x1", "1_0", "\u0663", " 7", "true"]
)
def test_a_header_that_makes_no_sense_is_ignored(number: str) -> None:
    assert read_hints(with_body(("", number))) == Hints()


@pytest.mark.parametrize("number", [-1, 2**31, 10**400, True, 1.5, "3", [], {}])
def test_numbers_beyond_a_schedulers_are_refused(number: object) -> None:
    with pytest.raises(ValueError, match="must be an integer from 0 to 2147483647"):
        read_hints(with_body(expected_output_tokens=number))


def test_our_own_hints_count_before_dynamos() -> None:
    dynamo = {"agent_hints": {"priority": -3, "osl": 70, "speculative_prefill": True}, "more": 1}
    hints = read_hints(with_body(nvext=dynamo))
    assert hints == Hints(expected_output=70, priority=-3)
    own = read_hints(with_body(nvext=dynamo, expected_output_tokens=5))
    assert own.expected_output == 5


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"prewarm": True}, 1800),
        ({"prewarm": True, "ttl": "12h"}, 43_200),
        ({"prewarm": True, "ttl": "5s", "mode": "explicit"}, 5),
        ({"prewarm": True, "ttl": None}, 1800),
        ({"prewarm": False, "ttl": "30m"}, None),
        # Without prewarm nothing is done, and so nothing refused.
        ({"ttl": None}, None),
        ({"prewarm": None, "ttl": "1d"}, None),
        (None, None),
    ],
)
def test_a_chat_is_prewarmed_for_its_time(options: Any, seconds: float | None) -> None:
    asked = with_body(messages=[], prompt_cache_options=options)
    assert read_hints(asked).prewarm == seconds
    elsewhere = with_body(prompt="x", prompt_cache_options=options)
    assert read_hints(elsewhere).prewarm is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        *(
            ({"prompt_stream_id": one}, "prompt_stream_id")
            for one in (7, "\ud800", [], {}, True, ["x"], {"id": LONG}, [LONG] * 10_000, DEEP)
        ),
        *(({"expected_output_tokens": one}, "expected_output_tokens") for one in (LONG, DEEP)),
        *(({"nvext": one}, "nvext") for one in (1, LONG, DEEP)),
        *(({"nvext": {"agent_hints": one}}, "nvext.agent_hints") for one in ([1], LONG, DEEP)),
        *(
            ({"nvext": {"agent_hints": {"osl": one}}}, "nvext.agent_hints.osl")
            for one in (-1, LONG, DEEP)
        ),
        ({"nvext": {"agent_hints": {"priority": True}}}, "nvext.agent_hints.priority"),
        *(({"prompt_cache_options": one}, "prompt_cache_options") for one in ("30m", LONG, DEEP)),
        *(
            ({"prompt_cache_options": {"prewarm": one}}, "prompt_cache_options.prewarm")
            for one in (1, LONG, DEEP)
        ),
        *(
            ({"prompt_cache_options": {"prewarm": True, "ttl": one}}, "prompt_cache_options.ttl")
            for one in ("1d", "0s", 30, LONG, DEEP)
        ),
    ],
)
def test_a_wrong_hint_is_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must be") as raised:
        read_hints(with_body(messages=[], **body))
    assert len(str(raised.value)) < 200
