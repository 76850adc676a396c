"""Says where the files of this repository are that are installed."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
# Package -> the folder that it lies in.
HOMES = {
    "mmdeploy_llm": ROOT,
    "mmdeploy_llm_plugins": ROOT / "plugins",
    "mmdeploy_llm_processors": ROOT / "processors",
}


def shipped(pattern: str = "*.py") -> dict[str, Path]:
    """Returns the shipped files by the paths that they are installed under, in their order."""
    return {
        path.relative_to(home).as_posix(): path
        for package, home in HOMES.items()
        for path in sorted((home / package).rglob(pattern))
        if path.is_file() and "__pycache__" not in path.parts
    }
