"""Stream agents' texts into other agents' prompts (FlashAgents, sections 3 and 4)."""
