"""Answers are heard while the engine writes them, and the calls stay as the program made them.

A client that listens opens a channel (``GET /flashmoa/calls``), and names each of its calls in a
header. The scheduler sends the new tokens of named calls to the HTTP process
(``scheduler/written.py``). The tokens are detokenised here (:class:`WrittenText`) and pass
SGLang's own streaming code (:class:`HeardCall`), so that text, reasoning and tool calls are told
apart as in an answer that is streamed. :class:`HeardCalls` has all calls and the channels that
hear them.
"""
