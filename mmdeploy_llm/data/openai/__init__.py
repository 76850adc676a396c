"""Lines of OpenAI's Batch API, as OpenAI and `vllm run-batch` take them, and their answers.

lines.py      a line becomes one of our own; what is ignored is told once
chat.py       the fields of a chat completion, and of a plain completion
responses.py  the fields of /v1/responses
params.py     parameters of sampling, tools and formats
bodies.py     a record becomes the body of a response
"""
