"""Tokens of a growing text that are equal to the tokens of the whole text."""
