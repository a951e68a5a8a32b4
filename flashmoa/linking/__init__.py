"""Carry the text one agent writes into the prompt of the next (FlashAgents, sections 3 and 4)."""
