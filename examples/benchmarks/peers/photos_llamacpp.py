"""llama.cpp with mtmd, for photos.py: its server, which loads the model once, and a client in this
process that has --parallel requests under way. --model: a folder with bf16.gguf, Q8_0.gguf,
Q4_0.gguf, mmproj-bf16.gguf and mmproj-Q8_0.gguf. --program: llama-server."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BEGUN = time.perf_counter()

import photo_job  # noqa: E402

FILES = {
    "bf16": ("bf16.gguf", "mmproj-bf16.gguf"),
    "int8": ("Q8_0.gguf", "mmproj-Q8_0.gguf"),
    "int4": ("Q4_0.gguf", "mmproj-Q8_0.gguf"),
}
PARALLEL = 8
TEXT_TOKENS = 192  # the question, the template and the answer, at most


def command(args: Any, port: int, parallel: int) -> list[str]:
    """Returns the command of the server."""
    text, projector = (f"{args.model}/{name}" for name in FILES[args.precision])
    context = parallel * (int(args.image_tokens) + TEXT_TOKENS)
    threads = args.threads or len(os.sched_getaffinity(0))
    found = [args.program, "-m", text, "--mmproj", projector, "--port", str(port)]
    found += ["-np", str(parallel), "-c", str(context), "-t", str(threads), "-b", "2048"]
    return [*found, "--image-max-tokens", args.image_tokens, "--jinja", "--no-warmup"]


def asked(url: str, photo: Path, num_tokens: int) -> dict[str, Any]:
    """Returns the server's answer about one picture."""
    data = base64.b64encode(photo.read_bytes()).decode("ascii")
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}},
        {"type": "text", "text": photo_job.QUESTION},
    ]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=3600) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when the server has loaded the model. Raises RuntimeError when it ends."""
    while process.poll() is None:
        with contextlib.suppress(OSError):  # errors of urllib are some too
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.02)
    raise RuntimeError(f"llama-server ended with {process.returncode}")


def main() -> None:
    """Captions the folder."""
    args = photo_job.parse()
    parallel = args.parallel or PARALLEL
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, lines = f"http://127.0.0.1:{port}", photo_job.Lines(args.output)
    log = args.output.with_suffix(".log").open("w")
    process = subprocess.Popen(command(args, port, parallel), stdout=log, stderr=log)
    try:
        wait_until_ready(url, process)
        ready = time.perf_counter() - BEGUN

        def caption(photo: Path) -> tuple[int, int]:
            found = asked(url, photo, args.tokens)
            lines.add(photo, found["choices"][0]["message"]["content"])
            return found["usage"]["completion_tokens"], found["usage"]["prompt_tokens"]

        with ThreadPoolExecutor(parallel) as pool:
            counts = list(pool.map(caption, sorted(args.photos.iterdir())))
    finally:
        process.terminate()
        process.wait()
    photo_job.answer(
        engine=f"llama.cpp {' + '.join(FILES[args.precision])}",
        ready=ready,
        num_tokens=sum(out for out, _ in counts),
        num_prompt_tokens=sum(prompt for _, prompt in counts),
    )


if __name__ == "__main__":
    main()
