"""Measures the memory that something takes at its peak."""

from __future__ import annotations

from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """The largest memory of this process since this was made. Only Linux tells it; elsewhere 0."""

    def __init__(self) -> None:
        try:
            CLEAR.write_text("5", encoding="ascii")  # the peak begins anew
        except OSError:
            self._before = None
        else:
            self._before = _read("VmRSS")

    def taken(self) -> int:
        """Returns the bytes that came on top of those at the beginning."""
        peak = _read("VmHWM")
        if self._before is None or peak is None:
            return 0
        return max(0, peak - self._before)


def _read(name: str) -> int | None:
    """Returns a size of this process in bytes."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found[1]) * 1024
