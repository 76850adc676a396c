"""llama.cpp's server, as a child process of this one."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from typing import IO, Any

# Of every request: the likeliest tokens, as many as are asked for, and no cache of prompts.
GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}


class Server:
    """Runs the program llama-server with arguments until it is stopped."""

    def __init__(self, program: str, arguments: Sequence[str], log: IO[str]) -> None:
        """Returns when the model is loaded. Raises RuntimeError when the program ends."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [program, *arguments, "--port", str(port)]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        while self._process.poll() is None:
            with contextlib.suppress(OSError):  # errors of urllib are some too
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return
            time.sleep(0.02)
        raise RuntimeError(f"llama-server ended with {self._process.returncode}")

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns what the server answers."""
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def stop(self) -> None:
        """Ends the program."""
        self._process.terminate()
        self._process.wait()
