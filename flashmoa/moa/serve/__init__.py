"""Serve mixtures, staircases, debates and councils by OpenAI's API (``flashmoa moa serve``)."""
