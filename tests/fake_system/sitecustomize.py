"""Makes a process, and those that it starts, look like one of Windows or macOS to this project's
own modules; libraries see Linux. On PYTHONPATH, with FAKE_SYSTEM=win32 or darwin.

What the other system lacks is missing: modules cannot be imported, names are no attributes, /proc
has no files. What Windows refuses raises: folders that are opened, files by the descriptor of one,
descriptors for children, a new name for a file that is open, files opened without O_BINARY.
"""

import builtins
import errno
import io
import os
import pathlib
import platform
import sys
import types

SYSTEM = os.environ.get("FAKE_SYSTEM")
OURS = ("mmdeploy_llm", "mmdeploy_llm_plugins", "mmdeploy_llm_processors")
BINARY = 1 << 30
real_import, real_open, real_os = builtins.__import__, builtins.open, os

POSIX_MODULES = "crypt curses fcntl grp posix pty pwd readline resource syslog termios tty"
NO_MODULES = POSIX_MODULES.split() if SYSTEM == "win32" else []
LINUX_ONLY = """
    O_PATH O_TMPFILE memfd_create sched_getaffinity sched_setaffinity preadv eventfd splice
    posix_fadvise posix_fallocate
"""
NAMES = {
    "os": """
        O_ACCMODE O_CLOEXEC O_DIRECT O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC
        RTLD_GLOBAL RTLD_LAZY RTLD_NOLOAD RTLD_NOW WNOHANG chown confstr copy_file_range
        fchdir fchmod fchown fdatasync fork forkpty fstatvfs geteuid getegid getgid getgroups
        getloadavg getpgid getpgrp getpriority getuid getxattr killpg lchown lockf mkfifo
        mknod nice openpty pipe2 posix_fadvise posix_fallocate posix_spawn pread pwrite
        pwritev readv register_at_fork sched_yield sendfile set_blocking setpgid setpriority
        setsid setuid statvfs sync sysconf ttyname uname wait wait3 wait4 waitid writev
    """,
    "signal": """
        SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2
        SIGWINCH SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm pthread_kill pthread_sigmask
        setitimer sigwait
    """,
    "socket": "AF_UNIX recv_fds send_fds SCM_RIGHTS",
    "mmap": "MADV_DONTNEED MADV_HUGEPAGE MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
}


class StandIn(types.ModuleType):
    """A module with some names hidden and some replaced; what is set is set in the real one."""

    def __init__(self, real, hidden="", **changed):
        own = types.ModuleType.__getattribute__(self, "__dict__")
        own.update(_real=real, _hidden=set(hidden.split()), _changed=changed)

    def __getattribute__(self, name):
        own = types.ModuleType.__getattribute__(self, "__dict__")
        if name in own["_hidden"]:
            raise AttributeError(f"module {own['_real'].__name__!r} has no attribute {name!r} here")
        if name in own["_changed"]:
            return own["_changed"][name]
        return getattr(own["_real"], name)

    def __setattr__(self, name, value):
        setattr(types.ModuleType.__getattribute__(self, "__dict__")["_real"], name, value)


def is_hidden(path):
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc/", "/sys/"))


def opened(path, *args, **kwargs):
    """open() without /proc and /sys."""
    if is_hidden(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return real_open(path, *args, **kwargs)


def no_folders(function, *words):
    """The function without descriptors of folders."""

    def called(*args, **kwargs):
        if any(kwargs.get(word) is not None for word in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            raise NotImplementedError("dir_fd unavailable on this platform")
        if function in (os.listdir, os.scandir) and args and isinstance(args[0], int):
            raise TypeError("a path, not a descriptor")
        return function(*args, **kwargs)

    return called


def is_open(path):
    """Whether this process has a file open."""
    try:
        wanted = real_os.lstat(path)
    except OSError:
        return False
    for number in real_os.listdir("/proc/self/fd"):
        try:
            if real_os.path.samestat(real_os.fstat(int(number)), wanted):
                return True
        except OSError:
            continue
    return False


def closed_only(function):
    """The function for files that are closed."""

    def called(*paths, **kwargs):
        if any(is_open(path) and not real_os.path.isdir(path) for path in paths):
            raise PermissionError(errno.EACCES, "another process uses the file", str(paths))
        return no_folders(function)(*paths, **kwargs)

    return called


def open_binary(path, flags, mode=0o777, *, dir_fd=None):
    """os.open of Windows."""
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if real_os.path.isdir(path):
        raise PermissionError(errno.EACCES, "a folder", str(path))
    assert flags & BINARY, f"{path} is opened as text"
    return real_os.open(path, flags & ~BINARY, mode)


def synced(fd):
    """os.fsync of Windows."""
    import fcntl

    if fcntl.fcntl(fd, fcntl.F_GETFL) & real_os.O_ACCMODE == real_os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    real_os.fsync(fd)


def stand_ins():
    """Returns the modules that this project gets in place of the real ones."""
    import ctypes
    import mmap
    import signal
    import socket
    import subprocess

    if SYSTEM == "darwin":
        import fcntl

        def asked(fd, command, *args):
            if command != 50:
                return fcntl.fcntl(fd, command, *args)
            return real_os.fsencode(real_os.readlink(f"/proc/self/fd/{fd}")).ljust(1024, b"\0")

        def no_link(path, **kwargs):
            opened(path) if is_hidden(path) else None
            return real_os.readlink(path, **kwargs)

        return [
            StandIn(os, LINUX_ONLY, readlink=no_link),
            StandIn(sys, platform="darwin"),
            StandIn(fcntl, F_GETPATH=50, fcntl=asked),
            StandIn(platform, machine=lambda: "arm64", system=lambda: "Darwin"),
            StandIn(mmap, "MADV_HUGEPAGE"),
        ]

    class Popen(subprocess.Popen):
        def __init__(self, *args, creationflags=0, **kwargs):
            for name in ("pass_fds", "preexec_fn", "start_new_session", "process_group"):
                if kwargs.get(name):
                    raise ValueError(f"{name} is not supported on Windows platforms")
            super().__init__(*args, **kwargs)

    def library(name, *args, **kwargs):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return ctypes.CDLL(name, *args, **kwargs)

    plain = ("stat", "lstat", "mkdir", "rmdir", "readlink", "listdir", "scandir", "access", "chmod")
    changed = {name: no_folders(getattr(os, name)) for name in plain}
    changed |= {name: closed_only(getattr(os, name)) for name in RENAMING}
    changed |= {"open": open_binary, "fsync": synced, "name": "nt", "O_BINARY": BINARY}
    changed |= {"supports_dir_fd": set(), "O_NOINHERIT": 0}
    return [
        StandIn(os, NAMES["os"] + LINUX_ONLY, **changed),
        StandIn(sys, platform="win32"),
        StandIn(signal, NAMES["signal"]),
        StandIn(socket, NAMES["socket"]),
        StandIn(mmap, NAMES["mmap"]),
        StandIn(ctypes, CDLL=library),
        StandIn(subprocess, Popen=Popen),
        StandIn(platform, machine=lambda: "AMD64", system=lambda: "Windows"),
    ]


RENAMING = ("rename", "replace", "unlink", "remove")


def install():
    """Gives this project's modules the stand-ins when they import."""
    found = {each.__name__: each for each in stand_ins()}
    if SYSTEM == "win32":  # for the methods of Path
        pathlib.os = StandIn(os, **{name: closed_only(getattr(os, name)) for name in RENAMING})
    builtins.open = io.open = opened

    def imported(name, globals=None, locals=None, fromlist=(), level=0):
        by = (globals or {}).get("__package__") or (globals or {}).get("__name__") or ""
        if level or by.partition(".")[0] not in OURS:
            return real_import(name, globals, locals, fromlist, level)
        if name in NO_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = real_import(name, globals, locals, fromlist, level)
        return found.get(module.__name__, module)

    builtins.__import__ = imported


if SYSTEM:
    install()
