"""Clients hear answers while the engine writes them, although their calls do not stream.

A client opens a channel (``GET /flashmoa/calls``), and names each of its calls in a header. The
scheduler sends the new tokens of named calls to the HTTP process (``scheduler/written.py``). There
:class:`WrittenText` detokenises them, and :class:`HeardCall` passes the text through SGLang's own
streaming code, which tells text, reasoning and tool calls apart. :class:`HeardCalls` has all calls
and the channels that hear them.
"""
