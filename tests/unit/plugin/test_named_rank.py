"""Test which data-parallel rank a request names."""

from __future__ import annotations

import pytest
from flashmoa_sglang.http.data_parallel import read_rank
from starlette.requests import Request


def request(*values: str) -> Request:
    headers = [(b"x-data-parallel-rank", value.encode("latin-1")) for value in values]
    return Request({"type": "http", "headers": headers})


def test_request_names_a_rank_or_none() -> None:
    assert read_rank(None, 2) is read_rank(request(), 2) is None
    assert [read_rank(request(str(rank)), 3) for rank in range(3)] == [0, 1, 2]
    assert read_rank(request("0"), 1) == 0


@pytest.mark.parametrize("value", ["2", "-1", "", "one", "1.0", "\u00b2", " 1"])
def test_rank_that_does_not_exist_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="whole number below 2, the number of data-parallel ranks"):
        read_rank(request(value), 2)
