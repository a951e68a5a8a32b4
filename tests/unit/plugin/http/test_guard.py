"""What would end a scheduler is refused behind SGLang's tokenisation; without SGLang."""

import math
import re
from array import array
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.http import guard
from flashmoa_sglang.sglang.releases import RELEASE
from hypothesis import example, given
from hypothesis import strategies as st

VOCABULARY, HIDDEN = 100, 4
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 128, "min_new_tokens": 0, "stop_token_ids": None, "stop_strs": [],
    "stop_regex_strs": [], "temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "n": 1,
    "beam_width": None, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
    "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "no_stop_trim": False, "stream_interval": None, "logit_bias": None, "sampling_seed": None,
    "custom_params": None,
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "input_ids": array("q", [1, 2, 3]), "input_text": "x", "input_embeds": None, "mm_inputs": None,
    "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False,
    "token_ids_logprob": None, "return_hidden_states": False, "session_params": None,
    "custom_logit_processor": None, "positional_embed_overrides": None, "bootstrap_room": None,
    "routed_dp_rank": None, "priority": None, "extra_key": None, "rid": "r",
    "multi_item_delimiter_indices": None, "token_indices_to_pool": None,
}  # fmt: skip


# Things that a test gives besides a message's fields.
OTHERS = {"media": False, "processor": None, "radix_cache": True, "labels": None, "lora_id": None}


def look(*, sampling: dict[str, Any] | None = None, **given: Any) -> Any:
    """Let the guard check a message, and return it."""
    media, processor, radix_cache, labels, lora_id = (
        given.pop(name, usual) for name, usual in OTHERS.items()
    )
    params = SimpleNamespace(**SAMPLING | (sampling or {}))
    message = SimpleNamespace(sampling_params=params, **MESSAGE | given)
    manager = SimpleNamespace(
        flashmoa_table=SimpleNamespace(engine=SimpleNamespace(has_radix_cache=radix_cache)),
        model_config=SimpleNamespace(vocab_size=VOCABULARY, hidden_size=HIDDEN, is_generation=True),
        mm_processor=processor,
        enable_metrics=True,
        metrics_collector=SimpleNamespace(labels={"model_name": "m", "team": ""}),
    )
    obj = SimpleNamespace(
        contains_mm_input=lambda: media, custom_labels=labels, lora_id=lora_id, lora_path=None
    )
    guard.refuse_harmful(message, manager, obj)
    return message


def session(**fields: Any) -> Any:
    none = dict.fromkeys(("id", "rid", "offset", "replace", "drop_previous_output"))
    return SimpleNamespace(**{**none, **fields})


NO_TOKENS = array("q")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input_ids": NO_TOKENS}, "prompt is empty"),
        ({"input_ids": None}, "prompt is empty"),
        # A model of text ignores media.
        ({"input_ids": NO_TOKENS, "media": True}, "prompt is empty"),
        ({"input_ids": NO_TOKENS, "media": True, "processor": 1, "mm_inputs": 1}, "is empty"),
        ({"input_ids": NO_TOKENS, "session_params": session()}, "prompt is empty"),
        ({"input_ids": [VOCABULARY]}, f"but has {VOCABULARY};"),
        *(({"input_ids": [1, one, 2]}, f"but has {one};") for one in (-1, 2**63, -(2**70))),
        ({"logprob_start_len": -5}, "logprob_start_len must be an integer from -1 to"),
        ({"logprob_start_len": [1]}, "logprob_start_len of one request must not be a list"),
        ({"top_logprobs_num": VOCABULARY + 1}, f"top_logprobs_num must be .* to {VOCABULARY}, not"),
        ({"top_logprobs_num": -1}, "top_logprobs_num must be an integer from 0"),
        ({"top_logprobs_num": None}, "top_logprobs_num must be an integer from 0"),
        ({"token_ids_logprob": [VOCABULARY]}, "token_ids_logprob must be in"),
        ({"token_ids_logprob": [[1]]}, r"token_ids_logprob must be in .* but has \[1\]"),
        ({"token_ids_logprob": 1}, "token_ids_logprob must be a list of token ids, not 1"),
        ({"return_hidden_states": []}, "return_hidden_states of one request"),
        ({"lora_id": "x"}, "lora_id is SGLang's own"),
        ({"positional_embed_overrides": "x"}, "cannot be given as JSON"),
        ({"bootstrap_room": 2**63}, "bootstrap_room must be an integer from"),
        ({"labels": {"model_name": "m", "mine": "x"}}, "unknown label: 'mine'"),
        ({"session_params": session(id=[])}, r"session_params\.id must be a string"),
        ({"session_params": session(id="s", rid={})}, r"session_params\.rid must be a string"),
        ({"session_params": session(id="s", offset=1.5)}, r"offset must be an integer"),
        ({"token_indices_to_pool": [3], "radix_cache": False}, "from 0 to 2, not 3"),
        ({"token_indices_to_pool": [], "radix_cache": False}, "at least one place"),
        ({"token_indices_to_pool": [0]}, "needs an engine with --disable-radix-cache"),
        ({"input_ids": None, "input_embeds": [[0.5] * 3]}, "must have 4 finite numbers"),
        ({"input_ids": None, "input_embeds": [[0.5] * 4, [0.5]]}, "list of lists of numbers"),
        ({"input_ids": None, "input_embeds": [[1e39] * 4]}, "must have 4 finite numbers"),
        ({"input_ids": None, "input_embeds": [[10**400] * 4]}, "list of lists of numbers"),
        ({"input_ids": None, "input_embeds": []}, "must have 4 finite numbers"),
        ({"sampling": {"top_k": 2**31}}, "top_k must be an integer from 1 to 2147483647"),
        ({"sampling": {"top_k": 1.5}}, "top_k must be an integer from 1 to 2147483647, not 1.5"),
        ({"sampling": {"min_new_tokens": 2**31}}, "min_new_tokens must be"),
        ({"sampling": {"max_new_tokens": "5"}}, "max_new_tokens must be an integer"),
        ({"sampling": {"temperature": float("nan")}}, "temperature must be a number"),
        ({"sampling": {"temperature": 1e308}}, "temperature must be a number from 0 to 1e"),
        ({"sampling": {"top_p": "1"}}, "top_p must be a number from 0 to 1"),
        ({"sampling": {"json_schema": {}}}, "json_schema must be a string"),
        ({"sampling": {"regex": "\ud800"}}, "regex must be Unicode text"),
        ({"sampling": {"ebnf": "a\0"}}, "ebnf must be Unicode text without NUL"),
        ({"sampling": {"skip_special_tokens": [1]}}, "skip_special_tokens must be true or false"),
        ({"sampling": {"skip_special_tokens": 0}}, "skip_special_tokens must be true or false"),
        ({"sampling": {"logit_bias": {"1": None}}}, "logit_bias must be a number"),
        ({"sampling": {"logit_bias": {"1": float("nan")}}}, "logit_bias must be a number"),
        ({"sampling": {"logit_bias": [1]}}, "logit_bias must be an object"),
        ({"sampling": {"logit_bias": []}}, "logit_bias must be an object"),
        ({"sampling": {"sampling_seed": 2**64}}, "sampling_seed must be"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_end_a_scheduler_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        look(**fields)
    assert len(str(raised.value)) < 150


def test_an_embedding_engine_refuses_to_generate() -> None:
    """Its scheduler ends at the forward for a second token."""
    config = SimpleNamespace(is_generation=False)
    manager = SimpleNamespace(flashmoa_table=object(), model_config=config)
    with pytest.raises(ValueError, match="ask for them at /v1/embeddings"):
        guard.refuse_harmful(SimpleNamespace(stream=False), manager, SimpleNamespace())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input_ids": [VOCABULARY - 1, 0]},
        # Processors put their own ids in the place of pictures, and some run in the scheduler.
        {"input_ids": [10**9, -5], "media": True, "processor": 1, "mm_inputs": 1},
        {"input_ids": NO_TOKENS, "media": True, "processor": 1},
        {"top_logprobs_num": VOCABULARY, "logprob_start_len": 0, "return_logprob": True},
        {"token_ids_logprob": [0, VOCABULARY - 1]},
        {"token_indices_to_pool": [0, 2], "radix_cache": False},
        {"input_ids": None, "input_embeds": [[0.5, 1, -1.0, 0.0]]},
        {"session_params": session(id="s", rid="r", offset=-3, replace=True)},
        {"labels": {"team": "x"}},
        {"return_hidden_states": "last"},
        {"sampling": {"max_new_tokens": None, "top_k": 1, "logit_bias": {"7": 1e308}, "n": 16}},
        {"sampling": {"custom_params": {"a": {"b": {"c": [[1], "two", None]}}}}},
        {"sampling": {"regex": "a", "stop_strs": ["x"], "stream_interval": 3, "ignore_eos": 1}},
    ],
    ids=str,
)
def test_what_a_scheduler_can_compute_passes(fields: dict[str, Any]) -> None:
    look(**fields)


def test_a_session_may_have_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"input_ids": NO_TOKENS, "session_params": session(id="s")}
    monkeypatch.setattr(RELEASE, "CHECKS_SESSIONS", True, raising=False)
    look(**fields)
    monkeypatch.setattr(RELEASE, "CHECKS_SESSIONS", False)
    with pytest.raises(ValueError, match="prompt is empty"):
        look(**fields)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [({5, 0}, {5, 0}), ({5, VOCABULARY, -1, 2**70}, {5}), ({VOCABULARY}, None), (None, None)],
)
def test_impossible_stop_tokens_are_dropped(sent: Any, kept: Any) -> None:
    """SGLang bans them, too, until ``min_new_tokens`` are generated, and has no such logits."""
    assert look(sampling={"stop_token_ids": sent}).sampling_params.stop_token_ids == kept


def test_a_bias_that_float32_lacks_is_infinite() -> None:
    bias = {"1": 1e39, "2": -(10**400), "3": 3e38, "4": -0.5, "5": math.inf}
    bounded = {**bias, "1": math.inf, "2": -math.inf}
    assert look(sampling={"logit_bias": bias}).sampling_params.logit_bias == bounded


def test_deeply_nested_params_are_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="at most 32 levels"):
        look(sampling={"custom_params": {"a": deep}})


numbers = st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 1e308])
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), numbers, st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
# SGLang's own types before the guard looks at them, whatever a client has sent.
TYPED = {"input_ids", "session_params", "stop_token_ids", "stop_strs", "stop_regex_strs", "rid"}


@given(name=st.sampled_from(sorted({*MESSAGE, *SAMPLING} - TYPED)), value=json_values)
@example(name="input_embeds", value=[[], [1]])
@example(name="token_ids_logprob", value={"a": 1})
@example(name="token_ids_logprob", value=[2**63, None])
@example(name="custom_logit_processor", value="{}")
def test_any_value_passes_or_is_refused_with_a_sentence(name: str, value: Any) -> None:
    if name == "custom_logit_processor":
        pytest.importorskip("torch")
    try:
        look(sampling={name: value}) if name in SAMPLING else look(**{name: value})
    except ValueError as error:
        assert name in str(error) and len(str(error)) < 200


@pytest.mark.parametrize(
    "error",
    [IndexError("list index"), TypeError("x" * 9999), re.error("bad"), RecursionError("deep")],
    ids=repr,
)
async def test_what_sglang_cannot_read_is_refused(error: Exception) -> None:
    async def read(*_: object) -> AsyncGenerator[Any]:
        raise error
        yield

    obj = SimpleNamespace(sampling_params={"n": 1}, rid="r")
    says = f"cannot read this request .{type(error).__name__}"
    with pytest.raises(ValueError, match=says) as told:
        await anext(guard.answer(read, None, obj, None))
    assert len(str(told.value)) < 150


@pytest.mark.parametrize("params", [{"n": 10**6}, [{"n": 1}, {"n": 10**6}]])
async def test_too_many_answers_are_refused(params: Any) -> None:
    obj = SimpleNamespace(sampling_params=params, rid=None)
    with pytest.raises(ValueError, match="n must be at most"):
        await anext(guard.answer(pytest.fail, None, obj, None))


@pytest.mark.parametrize("rid", [None, "r", ["r", "s"]], ids=str)
async def test_a_request_refused_early_stays_abortable(rid: Any) -> None:
    """It does so after a streamed answer, as here; an exception closes the client's connection."""

    async def refuse(_manager: object, obj: Any, _request: object) -> AsyncGenerator[Any]:
        obj.is_single = False  # The prompts are a list. The ids would become a list later.
        raise ValueError
        yield

    obj = SimpleNamespace(sampling_params=None, rid=rid)
    with pytest.raises(ValueError):
        await anext(guard.answer(refuse, None, obj, None))
    assert [*([obj.rid] if obj.is_single else obj.rid)] in ([None], ["r"], ["r", "s"])
