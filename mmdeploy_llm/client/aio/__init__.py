"""Requests from any thread or event loop, and several models in one process.

async_llm.py   AsyncLLM: submits requests and returns handles
handle.py      Handle: one request, read with or without asyncio
stats.py       RequestStats: timings and counts of a request
pool.py        ModelPool: installs, starts, stops and releases models
"""
