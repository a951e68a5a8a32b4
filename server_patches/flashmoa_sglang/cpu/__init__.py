"""A platform for a plain CPU, of real SGLang."""
