"""A selector prompt whose beginning stays the same from turn to turn."""

# AutoGen's own names the participants, who change each turn, before the conversation, so that
# nothing of the conversation is found in the cache the next time.
SELECTOR_PROMPT = """You decide who speaks next in a conversation. Who takes part:
{roles}

The conversation so far:

{history}

Which one of {participants} should speak next? Answer with that name and nothing else."""
