"""Opens progress bars: tqdm's own for the place where the program runs, or what a caller makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

UseTqdm = bool | Callable[..., Any]  # a callable is called as tqdm is, and returns a bar


def where_seen(use_tqdm: UseTqdm) -> UseTqdm | None:
    """Returns None for True: a bar that is shown on terminals and in notebooks only."""
    return use_tqdm if callable(use_tqdm) else None if use_tqdm else False


def open_bar(use_tqdm: UseTqdm | None, **options: Any) -> Any:
    """Opens a bar, in a notebook one of its widgets.

    use_tqdm: whether it is shown; None: on terminals and in notebooks; or what makes it, called as
    tqdm is. Raises TypeError when that makes no bar. options: of tqdm.
    """
    if callable(use_tqdm):
        return _made(use_tqdm(**options))
    from tqdm import auto  # which imports asyncio

    is_hidden = None if use_tqdm is None and not in_notebook() else use_tqdm is False
    return auto.tqdm(**options, dynamic_ncols=True, disable=is_hidden)


def _made(bar: Any) -> Any:
    lacking = [name for name in ("update", "close") if not callable(getattr(bar, name, None))]
    if lacking:
        raise TypeError(
            f"use_tqdm must return a progress bar, as tqdm does; the {type(bar).__name__} that it "
            f"returned has no method {' and no '.join(lacking)}"
        )
    return bar


def in_notebook() -> bool:
    """Returns whether bars are widgets of a notebook."""
    from tqdm import auto

    return auto.notebook_tqdm is not auto.std_tqdm


def show_words(bar: Any, words: str) -> None:
    """Shows words after a bar, where its class has a place for them."""
    show = getattr(bar, "set_postfix_str", None)
    if callable(show):
        show(words, refresh=False)
