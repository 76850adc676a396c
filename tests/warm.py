"""Starts ranks, engines and other processes that compute from one that has imported torch: each
that begins anew takes seconds for it. Loaded by tests/conftest.py, which replaces the `subprocess`
of the module that starts them.

    Popen([python, "-c", ...], pass_fds=...)
      pytest --a line: command, folder, environment; files--> server --fork--fork--> the child
             <-- its id ---------------------------------------

The child is a child of pytest, in its group and session, with the files, folder, environment and
cores that it has otherwise. What libraries read when they are imported is the server's. Programs
that tests run begin their own children as users' programs do.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading

from mmdeploy_llm.system.processes.process import BOOT

PRELOADED = (
    "mmdeploy_llm.engine.desk.many",
    "mmdeploy_llm.engine.desk.remote",
    "mmdeploy_llm.engine.runner.distributed",
    "mmdeploy_llm.engine.startup.start",
)
# Helpers, which need no torch, by the names of their workers: they begin as ever.
LIGHT = {"grammar", "schema", "template", "the process that reads it", "tokenizer"}
SERVER = """
import fcntl, importlib, json, os, socket, sys, time, types

def asked(peer):
    "Returns, in a process of its own, what a child is to do, and its files."
    while True:
        size, files, _, _ = socket.recv_fds(peer, 8, 64)
        if not size:
            os._exit(0)
        request = json.loads(peer.recv(int(size, 16), socket.MSG_WAITALL))
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(tell, b"%d\\n" % child)
                os._exit(0)
            for file in (peer.detach(), told, tell):
                os.close(file)
            return request, files
        os.waitpid(between, 0)  # from now on the child's parent is pytest
        peer.sendall(os.read(told, 99))
        for file in (*files, told, tell):
            os.close(file)

def become(request, files):
    "Takes on the files, folder, environment and cores of the child."
    above = max(request["files"]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], moved):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["cores"])
    sys.argv[:] = ["-c", *request["words"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    while os.getppid() != request["parent"]:  # which it has once the process between has ended
        if os.getppid() == 1:
            os._exit(1)
        time.sleep(0.0005)

peer = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
request, files = asked(peer)
become(request, files)
exec(compile(request["code"], "<string>", "exec"), vars(sys.modules["__main__"]))
"""
PR_SET_CHILD_SUBREAPER = 36


class Server:
    """The process that is forked, started with the first child."""

    def __init__(self):
        self._process = None

    def fork(self, request, files):
        """Returns the id of a new child of this process; a test may have ended the server."""
        for is_last in (False, True):
            try:
                return self._fork(json.dumps(request).encode(), files)
            except (OSError, ValueError):
                self.close()
                if is_last:
                    raise

    def _fork(self, data, files):
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        adopts_orphans(True)
        try:
            socket.send_fds(self._peer, [b"%8x" % len(data)], files)
            self._peer.sendall(data)
            return int(self._answers.readline())
        finally:
            adopts_orphans(False)

    def _start(self):
        self._peer, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, endings)
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(number), *PRELOADED],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._answers = self._peer.makefile()

    def close(self):
        """Ends the server."""
        if self._process is not None:
            self._answers.close()
            self._peer.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def adopts_orphans(is_so):
    """Whether a process below this one whose parent ends becomes a child of this one."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_so), 0, 0, 0) == 0


class Warm:
    """Stands for the module `subprocess`."""

    TimeoutExpired = subprocess.TimeoutExpired
    DEVNULL = subprocess.DEVNULL

    def __init__(self):
        self._home = os.getpid()
        self._lock = threading.Lock()
        self._server = Server()

    def Popen(self, command, *, pass_fds, stdin, **streams):
        """subprocess.Popen, as the product calls it."""
        _, _, code, *words = command
        is_other = code != BOOT or words[2] in LIGHT
        if is_other or os.getpid() != self._home:  # a forked process has no server
            return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, **streams)
        request = {
            "code": code,
            "words": words,
            "files": [0, 1, 2, *pass_fds],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "cores": [*os.sched_getaffinity(0)],
            "parent": os.getpid(),
        }
        with open(os.devnull, "rb") as nothing, self._lock:
            assert stdin == self.DEVNULL
            output, errors = streams["stdout"].fileno(), streams["stderr"].fileno()
            files = [nothing.fileno(), output, errors, *pass_fds]
            return started(command, self._server.fork(request, files))

    def close(self):
        """Ends the server."""
        self._server.close()


def started(command, pid):
    """Returns subprocess.Popen for a child that runs already."""
    child = subprocess.Popen.__new__(subprocess.Popen)
    child.args, child.pid, child.returncode = command, pid, None
    child.stdin = child.stdout = child.stderr = None
    child._child_created, child._sigint_wait_secs = True, 0.25
    child._waitpid_lock = threading.Lock()
    return child
