"""llama.cpp with mtmd, for photos.py: its server, which loads the model once, and a client in this
process that has --parallel requests under way. --model: a folder with bf16.gguf, Q8_0.gguf,
Q4_0.gguf, mmproj-bf16.gguf and mmproj-Q8_0.gguf. --program: llama-server."""

import base64
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BEGUN = time.perf_counter()

import photo_job  # noqa: E402
from llama_server import GREEDY, Server  # noqa: E402

FILES = {
    "bf16": ("bf16.gguf", "mmproj-bf16.gguf"),
    "int8": ("Q8_0.gguf", "mmproj-Q8_0.gguf"),
    "int4": ("Q4_0.gguf", "mmproj-Q8_0.gguf"),
}
PARALLEL = 8
TEXT_TOKENS = 192  # the question, the template and the answer, at most


def arguments(args: Any, parallel: int) -> list[str]:
    """Returns those of the server."""
    text, projector = (f"{args.model}/{name}" for name in FILES[args.precision])
    context = parallel * (int(args.image_tokens) + TEXT_TOKENS)
    threads = args.threads or len(os.sched_getaffinity(0))
    found = ["-m", text, "--mmproj", projector, "-np", str(parallel), "-c", str(context)]
    found += ["-t", str(threads), "-b", "2048"]
    return [*found, "--image-max-tokens", args.image_tokens, "--jinja", "--no-warmup"]


def question(photo: Path, num_tokens: int) -> dict[str, Any]:
    """Returns the request about a picture."""
    data = base64.b64encode(photo.read_bytes()).decode("ascii")
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}},
        {"type": "text", "text": photo_job.QUESTION},
    ]
    messages = [{"role": "user", "content": parts}]
    return {"messages": messages, "max_tokens": num_tokens, **GREEDY}


def main() -> None:
    """Captions the folder."""
    args = photo_job.parse()
    parallel = args.parallel or PARALLEL
    lines = photo_job.Lines(args.output)
    log = args.output.with_suffix(".log").open("w")
    server = Server(args.program, arguments(args, parallel), log)
    ready = time.perf_counter() - BEGUN

    def caption(photo: Path) -> tuple[int, int]:
        found = server.ask("/v1/chat/completions", question(photo, args.tokens))
        lines.add(photo, found["choices"][0]["message"]["content"])
        return found["usage"]["completion_tokens"], found["usage"]["prompt_tokens"]

    try:
        with ThreadPoolExecutor(parallel) as pool:
            counts = list(pool.map(caption, sorted(args.photos.iterdir())))
    finally:
        server.stop()
    photo_job.answer(
        engine=f"llama.cpp {' + '.join(FILES[args.precision])}",
        ready=ready,
        num_tokens=sum(out for out, _ in counts),
        num_prompt_tokens=sum(prompt for _, prompt in counts),
    )


if __name__ == "__main__":
    main()
