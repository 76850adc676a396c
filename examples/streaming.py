"""Prints the answer while it is generated: `python examples/streaming.py`."""

from pathlib import Path

from mmdeploy_llm import LLM, SamplingParams

picture = Path(__file__).parent / "images" / "picture-9.jpg"
messages = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": str(picture)},
            {"type": "text", "text": "What do you see?"},
        ],
    }
]

with LLM(model="shapes-vl", reasoning_parser="ernie-45-vl") as llm:
    for delta in llm.stream(messages, SamplingParams(temperature=0, max_tokens=200)):
        # Each delta holds only new text; the reasoning comes before the answer.
        if delta.outputs.reasoning_content:
            print(f"[thinking]{delta.outputs.reasoning_content}", end="", flush=True)
        print(delta.outputs.text, end="", flush=True)
print()
