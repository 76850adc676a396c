"""The one way to an engine: prompts are handed in from any thread, outputs come back.

answerer.py    Answerer: what answers prompts, as those that use it see it
ask.py         Ask: a prompt and how to answer it
ticket.py      Ticket: its outputs until they are read
desk.py        the queue, the limits and the methods that all desks have
local.py       computes with an engine in this process, in a thread of its own
remote.py      a local desk in another process, and what serves it there
many.py        several desks of one model (data parallelism)
feed.py        takes prompts from an iterable as a desk can begin them
deaths.py      what becomes of a prompt whose engine died
merge.py       makes one output of several: n completions, unread deltas
"""
