"""Calls that only some systems have go through mmdeploy_llm/system/portable/, and the
package works in a process that lacks them."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tree import shipped

ROOT = Path(__file__).parents[1]
PORTABLE = "mmdeploy_llm/system/portable/"
FAKE = Path(__file__).parent / "fake_system"

# Modules that not every system has.
MODULES = """
    crypt curses fcntl grp msvcrt posix pty pwd readline resource spwd syslog termios tty winreg
"""
# Of modules that every system has, the names that only some have; and cpu_count, which knows no
# affinity and no control groups: machine.num_cpus does.
NAMES = {
    "os": """
        cpu_count O_ACCMODE O_BINARY O_CLOEXEC O_DIRECT O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK
        O_PATH O_SYNC O_TMPFILE RTLD_GLOBAL RTLD_LAZY RTLD_NOLOAD RTLD_NOW WEXITSTATUS
        WIFEXITED WIFSIGNALED WNOHANG WTERMSIG chown chroot confstr copy_file_range ctermid
        eventfd fchdir fchmod fchown fdatasync fork forkpty fstatvfs geteuid getegid getgid
        getgroups getloadavg getpgid getpgrp getpriority getresuid getuid getxattr killpg
        lchown lockf memfd_create mkfifo mknod nice openpty pipe2 posix_fadvise
        posix_fallocate posix_spawn pread preadv pwrite pwritev readv register_at_fork
        sched_getaffinity sched_setaffinity sched_yield sendfile set_blocking setpgid
        setpriority setsid setuid setxattr splice statvfs supports_dir_fd sync sysconf ttyname
        uname wait wait3 wait4 waitid waitpid writev
    """,
    "signal": """
        SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2
        SIGWINCH SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm pthread_kill pthread_sigmask
        setitimer sigpending sigtimedwait sigwait sigwaitinfo
    """,
    "socket": "AF_UNIX MSG_NOSIGNAL SCM_RIGHTS SO_PEERCRED recv_fds send_fds",
    "mmap": "MADV_DONTNEED MADV_HUGEPAGE MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "ctypes": "WinDLL windll",
    "time": "clock_gettime pthread_getcpuclockid tzset",
}
KEYWORDS = "dir_fd pass_fds preexec_fn process_group src_dir_fd dst_dir_fd start_new_session"
FOLDERS = ("/proc", "/sys", "/dev")
# Elsewhere: what only one system has at all, tried and done without. File -> names, each of which
# it asks for before it uses them.
ALONE = {
    "mmdeploy_llm/cli/doctor/examination.py": "/proc",
    "mmdeploy_llm/media/beneath.py": "dir_fd",  # openat2
    "mmdeploy_llm/kernels/cpu/cores.py": "cpu_count",  # as many threads as torch chooses
    "mmdeploy_llm/kernels/cpu/crowd.py": "/proc",
    "mmdeploy_llm/kernels/cpu/memory.py": "/sys MADV_DONTNEED MAP_ANONYMOUS MAP_PRIVATE",
    "mmdeploy_llm/kernels/cpu/openmp.py": "register_at_fork",
    "mmdeploy_llm/testing/data/removing.py": "fork waitpid setitimer SIGKILL",
    "mmdeploy_llm/testing/plugins/fetchers.py": "/dev /proc",
    "mmdeploy_llm/testing/plugins/left_over.py": "/proc",
    "mmdeploy_llm/testing/plugins/bounded.py": "/proc",
    "mmdeploy_llm/weights/read_ahead.py": "preadv",
    "mmdeploy_llm/system/processes/wire.py": "MAP_PRIVATE memfd_create",
}


def found_in(tree):
    """Yields line and name of everything in a syntax tree that not every system has."""
    modules = set(MODULES.split())
    names = {module: set(text.split()) for module, text in NAMES.items()}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, each.name) for each in aliases if each.name in modules)
            case ast.ImportFrom(module=str(module), level=0, names=aliases):
                if module in modules:
                    yield node.lineno, module
                own = names.get(module, set())
                yield from ((node.lineno, each.name) for each in aliases if each.name in own)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if name in names.get(module, ()):
                    yield node.lineno, name
            case ast.Call(func=ast.Attribute(attr="CDLL"), args=[ast.Constant(value=None), *_]):
                yield node.lineno, "CDLL(None)"
            case ast.keyword(arg=str(name)) if name in KEYWORDS.split():
                yield node.value.lineno, name
            case ast.Constant(value=str(text)):
                yield from ((node.lineno, it) for it in FOLDERS if text.startswith(f"{it}/"))


def texts_of_any_encoding(tree):
    """Yields the lines that open a text file whose encoding the system chooses: not UTF-8 on
    Windows."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(it.arg == "encoding" for it in node.keywords):
            continue
        match node.func:
            case ast.Attribute(attr="read_text") if not node.args:
                yield node.lineno
            case ast.Attribute(attr="write_text", value=it) if len(node.args) == 1:
                if ast.unparse(it) != "formatter":  # click's
                    yield node.lineno
            case ast.Name(id="open") | ast.Attribute(attr="fdopen"):
                if "b" not in mode_of(node, 1):
                    yield node.lineno
            case ast.Attribute(attr="open") if re.fullmatch("[rwax]t?", mode_of(node, 0)):
                yield node.lineno


def mode_of(call, place):
    """Returns the mode of a call of open, where it is written out."""
    found = [it.value for it in call.keywords if it.arg == "mode"] or call.args[place : place + 1]
    if not found:
        return "r" if place else ""
    return str(getattr(found[0], "value", "b"))


def misplaced(files):
    """Returns the places of such names outside system/portable/ and their own files."""
    wrong = []
    for name, path in files.items():
        if name.startswith(PORTABLE) or "templates" in path.parts:
            continue
        allowed = ALONE.get(name, "").split()
        for line, found in found_in(ast.parse(path.read_text("utf-8"))):
            if found not in allowed:
                wrong.append(f"{name}:{line}: {found}")
    return wrong


@pytest.mark.full
def test_calls_of_one_system_are_in_their_modules():
    assert misplaced(shipped()) == []


@pytest.mark.full
def test_text_files_name_their_encoding():
    wrong = [
        f"{path}:{line}"
        for path in shipped().values()
        for line in texts_of_any_encoding(ast.parse(path.read_text("utf-8")))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, 'rb')", False),
        ("open(path, mode='wb')", False),
        ("open(path, 'w', encoding='utf-8')", False),
        ("path.open('w')", True),
        ("path.open('xb')", False),
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text('x')", True),
    ],
)
def test_the_rule_of_encodings(text, is_found):
    assert bool(list(texts_of_any_encoding(ast.parse(text)))) is is_found


def test_no_place_is_allowed_that_is_not_needed():
    files = shipped()
    for name, allowed in ALONE.items():
        found = {it for _, it in found_in(ast.parse(files[name].read_text("utf-8")))}
        assert set(allowed.split()) <= found, name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import fcntl", "fcntl"),
        ("def f():\n    from resource import getrusage", "resource"),
        ("from os import fork", "fork"),
        ("os.sched_getaffinity(0)", "sched_getaffinity"),
        ("os.open(path, os.O_RDONLY | os.O_NONBLOCK)", "O_NONBLOCK"),
        ("os.stat(name, dir_fd=3)", "dir_fd"),
        ("signal.signal(signal.SIGHUP, f)", "SIGHUP"),
        ("open('/proc/meminfo')", "/proc"),
        ("open(f'/proc/{number}/stat')", "/proc"),
        ("ctypes.CDLL(None).getenv", "CDLL(None)"),
        ("subprocess.Popen(words, pass_fds=(3,))", "pass_fds"),
    ],
)
def test_the_rule_finds(tmp_path, text, found):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [line.rpartition(" ")[2] for line in misplaced({path.name: path})] == [found]


def run(system, code, folder, *words):
    """Runs a program in a process that looks like one of another system to this package."""
    environment = {**os.environ, "PYTHONPATH": str(FAKE), "FAKE_SYSTEM": system}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


PROGRAM = """
import importlib, pkgutil, sys
for package in ("mmdeploy_llm", "mmdeploy_llm_plugins", "mmdeploy_llm_processors"):
    found = importlib.import_module(package)
    for item in pkgutil.walk_packages(found.__path__, package + "."):
        if not item.name.startswith(("mmdeploy_llm.kernels.cuda.", "mmdeploy_llm.testing.")):
            importlib.import_module(item.name)
from mmdeploy_llm.cli import main
from mmdeploy_llm.system.portable import files
assert (files.sys.platform, hasattr(files.os, "memfd_create")) == (sys.argv.pop(1), False)
words = sys.argv[1:]
for more in (["--report", "out.html"], ["--resume"]):
    sys.argv[1:] = [*words, *more]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end
"""


@pytest.mark.full
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_two_pictures_are_captioned(tmp_path, system):
    """Every module is imported; a run writes its files, which another finds done."""
    for name in ("picture-1.png", "picture-10.png"):
        shutil.copy(ROOT / "examples" / "images" / name, tmp_path)
    words = ["caption", ".", "--output", "out.jsonl", "--max-tokens", "16", "--no-thinking"]
    done = run(system, PROGRAM, tmp_path, system, *words)
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["error"] for line in lines] == [None, None], done.stderr
    assert done.stderr.count("cannot limit the memory of a process") == 1
