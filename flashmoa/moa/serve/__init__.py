"""Serve mixtures, staircases and debates as models of the OpenAI API (``flashmoa moa serve``)."""
