"""Stream the text of one agent into the prompts of others (FlashAgents, sections 3 and 4)."""
