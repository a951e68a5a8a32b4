"""Derives from the plugin's source what it uses inside SGLang, and writes the list of it.

``python -m tests.unit.plugin.used_names`` writes the list that the plugin is shipped with. A list
kept by hand would be out of date with the first line that forgets it; this one is compared with the
source by a test.
"""
