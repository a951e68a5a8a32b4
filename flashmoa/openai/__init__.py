"""Link the calls of any program that uses OpenAI's asynchronous client, or a framework on it.

Needs the extra ``openai``.
"""

from flashmoa.openai._client import AsyncOpenAI, link
from flashmoa.openai._runs import run

__all__ = ["AsyncOpenAI", "link", "run"]
