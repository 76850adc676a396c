"""Starts several prompts at once and reads each from its own handle, as DashInfer's guide does:
`python examples/async_engine.py`. No line of it waits for the model but `start`, `get`, `result`.
"""

import threading
from pathlib import Path
from typing import Any

from mmdeploy_llm import Handle, ModelPool, SamplingParams

PICTURE = Path(__file__).parent / "images" / "picture-5.png"
QUESTIONS = ("What is in this picture?", "How many shapes are there?", "Is there a small star?")


def prompt(question: str) -> dict[str, Any]:
    """Returns a question about the picture, to be answered without reasoning."""
    content = [{"type": "image", "image": str(PICTURE)}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}


def show(question: str, handle: Handle) -> None:
    """Prints a request's new text until it ends; each handle has a reader of its own."""
    while (delta := handle.get()) is not None:
        state = f"{handle.status}, {handle.generated_length} tokens"
        print(f"{question} {delta.outputs.text!r} ({state})")


with ModelPool() as engine:
    engine.install(
        "shapes", "shapes-vl", max_num_seqs=8, reasoning_parser="auto"
    )  # reads nothing yet
    model = engine.start("shapes")  # loads the weights and warms up
    print(*engine.status(), sep="\n")

    # submit returns at once; the model computes whether anybody reads or not.
    params = SamplingParams(temperature=0, max_tokens=60)
    handles = [model.submit(prompt(question), params) for question in QUESTIONS]
    readers = [
        threading.Thread(target=show, args=pair) for pair in zip(QUESTIONS, handles, strict=True)
    ]
    endless = model.submit("A red", SamplingParams(max_tokens=1500, ignore_eos=True))
    for reader in readers:
        reader.start()

    outputs = [handle.result() for handle in handles]  # waits for all
    endless.abort()
    print("stopped after", len(endless.result().outputs.token_ids), "tokens:", endless.status)

    for reader, handle, output in zip(readers, handles, outputs, strict=True):
        reader.join()
        print(
            f"{output.outputs.text} ({handle.stats.time_to_first_token:.3f} s to the first token)"
        )
        handle.release()

    engine.stop("shapes")  # gives the memory back; start loads it again
    engine.release("shapes")
