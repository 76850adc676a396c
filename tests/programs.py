"""Runs programs in processes that are forked from one which has imported torch, transformers and
the package: each program that does so by itself takes seconds for it. Loaded by tests/conftest.py.

    pytest --a line: code, words, folder, environment, files--> server --fork--> the program
           <-- the program's id, then its exit code ---------

A program has a `__main__`, a session and an environment of its own, and ends as any other. What
libraries read when they are imported, such as OMP_NUM_THREADS, is the server's. A program that must
show how it starts has a process of its own instead.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

PRELOADED = (
    *("mmdeploy_llm.client.llm", "mmdeploy_llm.engine.desk.many", "mmdeploy_llm.batch.job"),
    *(
        "mmdeploy_llm.batch.documents.reading.plan",
        "mmdeploy_llm.batch.report.whole",
        "mmdeploy_llm.testing.check_models",
        "mmdeploy_llm.testing.check_processors",
    ),
    "transformers.modeling_utils",
)
SERVER = """
import importlib, json, os, signal, socket, sys, tempfile, types

def asked(peer):
    "Returns, in a process of its own, what a program is to do."
    for line in peer.makefile():
        request = json.loads(line)
        child = os.fork()
        if not child:
            peer.close()
            return request
        peer.sendall(b"%d\\n" % child)
        status = os.waitpid(child, 0)[1]
        peer.sendall(b"%d\\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)

def become(request):
    "Takes on files, folder and environment of the program; returns its names."
    os.setsid()
    for number, name in enumerate(request["files"]):
        file = os.open(name, os.O_RDONLY if not number else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    added = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in added if path and path not in sys.path]
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = ["-c", *request["words"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(sys.modules["__main__"])

peer = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
request = asked(peer)
names = become(request)
exec(compile(request["code"], "<string>", "exec"), names)
"""


class Programs:
    """The server, started when the first program is run; one program at a time."""

    def __init__(self):
        self._server = None

    def run(self, code, *words, cwd=None, env=None, timeout=1800):
        """Returns returncode, stdout and stderr of a program, as subprocess.run does."""
        if self._server is None or self._server.poll() is not None:  # a test may have ended it
            self.close()
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            files = [os.devnull, f"{folder}/stdout", f"{folder}/stderr"]
            for file in files[1:]:
                Path(file).touch()
            request = {
                "code": code,
                "words": [str(word) for word in words],
                "folder": str(cwd or os.getcwd()),
                "environment": {**os.environ, **(env or {})},
                "files": files,
            }
            self._peer.sendall(json.dumps(request).encode() + b"\n")
            child = int(self._answers.readline())
            self._peer.settimeout(timeout)
            try:
                code = int(self._answers.readline())
            except TimeoutError:
                os.killpg(child, signal.SIGKILL)
                self.close()
                told = Path(files[2]).read_text()
                raise AssertionError(f"a program has not ended after {timeout} s: {told}") from None
            self._peer.settimeout(None)
            stdout, stderr = (Path(file).read_text() for file in files[1:])
        return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    def _start(self):
        self._peer, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(number), *PRELOADED],
                pass_fds=(number,),
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                start_new_session=True,
            )
        self._answers = self._peer.makefile()

    def close(self):
        """Ends the server."""
        if self._server is not None:
            self._answers.close()
            self._peer.close()
            self._server.kill()
            self._server.wait()
            self._server = None
