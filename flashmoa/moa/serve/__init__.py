"""Serve mixtures, staircases, debates and councils as models of the OpenAI API (``flashmoa moa serve``)."""
