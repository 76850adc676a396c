"""Runs a command with a limit on its memory, in a control group of Linux of its own.

    in_group.py BYTES COMMAND...        such as: in_group.py 8e9 memory_budget.py run FOLDER

The group is one of version 1 beneath that of this process, which takes root, and is removed
afterwards; with version 2 `systemd-run` makes a scope. The limit counts what a container's does:
anonymous memory and the pages of files that the command has read, which the system takes back
first. A command that needs more is killed. Prints the most that the group had, and how often it
was at its limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup/memory")


def own_group() -> Path | None:
    """Returns the folder of this process's group of version 1, None where there is none."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, names, path = line.split(":", 2)
        if "memory" in names.split(","):
            return MOUNT / path.lstrip("/")
    return None


def run(limit: int, command: list[str]) -> int:
    """Runs the command in a group beneath that of this process; returns its exit status."""
    own = own_group()
    if own is None:
        scope = ("systemd-run", "--scope", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0")
        return subprocess.call([*scope, *command])
    group = own / f"limited-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

        code = subprocess.Popen(command, preexec_fn=enter).wait()
        most = int((group / "memory.max_usage_in_bytes").read_text(encoding="ascii"))
        times = int((group / "memory.failcnt").read_text(encoding="ascii"))
        print(f"at most {most / 1e9:.2f} of {limit / 1e9:.2f} GB, {times} times at the limit")
        return code
    finally:
        group.rmdir()


def main() -> None:
    """Runs what was asked for."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    limit, *command = sys.argv[1:]
    if command[0].endswith(".py"):
        command.insert(0, sys.executable)
    sys.exit(run(int(float(limit)), command))


if __name__ == "__main__":
    main()
