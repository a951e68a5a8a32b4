"""Rank documents with the rerankers of Cohere, LangChain and LlamaIndex, by prefills alone.

pip install cohere langchain-cohere llama-index-postprocessor-cohere-rerank
    llama-index-postprocessor-jinaai-rerank
python examples/rerankers.py --engine http://HOST:30000 [--client cohere]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

QUERY = "Where can I walk along a lake?"
DOCUMENTS = (
    "Tea is grown in Ilam, in the east.",
    "Pokhara lies at Phewa lake, with paths along its shore.",
    "Flights to Lukla are often late.",
)
# An engine with --api-key checks the key. These clients want one in any case.
KEY = "none"
Ranked = list[tuple[int, float]]


def cohere(url: str) -> Ranked:
    """Rank with Cohere's client."""
    client = import_module("cohere").ClientV2(api_key=KEY, base_url=url)
    answer = client.rerank(model="default", query=QUERY, documents=list(DOCUMENTS))
    return [(one.index, one.relevance_score) for one in answer.results]


def langchain(url: str) -> Ranked:
    """Rank with LangChain's compressor."""
    reranker = import_module("langchain_cohere").CohereRerank
    compressor = reranker(model="default", cohere_api_key=KEY, base_url=url)
    found = compressor.rerank(list(DOCUMENTS), QUERY)
    return [(one["index"], one["relevance_score"]) for one in found]


def llamaindex_cohere(url: str) -> Ranked:
    """Rank with LlamaIndex's postprocessor for Cohere."""
    reranker = import_module("llama_index.postprocessor.cohere_rerank").CohereRerank
    return _postprocess(reranker(model="default", api_key=KEY, base_url=url, top_n=3))


def llamaindex_jina(url: str) -> Ranked:
    """Rank with LlamaIndex's postprocessor for Jina."""
    reranker = import_module("llama_index.postprocessor.jinaai_rerank").JinaRerank
    return _postprocess(reranker(model="default", api_key=KEY, base_url=f"{url}/v1", top_n=3))


def _postprocess(postprocessor: Any) -> Ranked:
    schema = import_module("llama_index.core.schema")
    nodes = [
        schema.NodeWithScore(node=schema.TextNode(text=text, id_=str(index)))
        for index, text in enumerate(DOCUMENTS)
    ]
    found = postprocessor.postprocess_nodes(nodes, query_str=QUERY)
    return [(int(one.node.node_id), one.score) for one in found]


CLIENTS: dict[str, Callable[[str], Ranked]] = {
    "cohere": cohere,
    "langchain": langchain,
    "llamaindex-cohere": llamaindex_cohere,
    "llamaindex-jina": llamaindex_jina,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a client's ranking, or all clients'."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="http://127.0.0.1:30000", metavar="URL")
    parser.add_argument("--client", choices=CLIENTS, help="by default, all of them")
    options = parser.parse_args(arguments)
    for name in [options.client] if options.client else CLIENTS:
        print(name)
        for index, score in CLIENTS[name](options.engine):
            print(f"  {score:.3f} {DOCUMENTS[index]}")


if __name__ == "__main__":
    main()
