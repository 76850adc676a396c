"""LLM, the object that users see, and what it has in common with AsyncLLM.

llm.py        LLM: answers lists of prompts
client.py     EngineClient: a model at a desk, its base and that of AsyncLLM
answering.py  many prompts in one call
arguments.py  checks the arguments of their methods
embedding.py  asks for vectors, scores and labels
counting.py   counts tokens without a model
belonging.py  an object that works only in the process that made it
"""
