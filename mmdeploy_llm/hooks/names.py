"""Names and error texts in the form in which the plugin code compares and shows them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TypeVar

from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.values.text.display import error_text

__all__ = ["did_you_mean", "error_text", "listing", "normalise", "shown_uri", "with_file"]

Fault = TypeVar("Fault", bound=Exception)

MAX_SHOWN_URI = 80  # characters; a data: URL can be megabytes long
MAX_SHOWN_PATH = 500


def normalise(name: str) -> str:
    """Returns the form in which names are compared: "Acme_45_VL" becomes "acme-45-vl"."""
    return name.strip().replace("_", "-").lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" when `known` has a name close to `name`, else ""."""
    by_form = {normalise(candidate): candidate for candidate in known}
    near = difflib.get_close_matches(normalise(name), by_form, n=1)
    return f"; did you mean {by_form[near[0]]!r}?" if near else ""


def listing(names: Iterable[str]) -> str:
    """Returns the names sorted and separated by commas, "none" when there are none."""
    return ", ".join(sorted(set(names))) or "none"


def shown_uri(ref: MediaRef) -> str:
    """Returns the URI for messages: a path as the caller gave it, a URL without credentials and
    query, and never long."""
    text, mark, rest = ref.uri.partition("://")
    if mark and ref.scheme != "file":
        text = f"{text}://{rest.partition('?')[0].rpartition('@')[2]}"
    elif ref.scheme != "data":
        text = re.sub(r"^(\s*file://)[^/]*@", r"\1", ref.uri, flags=re.IGNORECASE)
        half = MAX_SHOWN_PATH // 2
        return repr(text if len(text) <= MAX_SHOWN_PATH else f"{text[:half]}...{text[-half:]}")
    else:
        text = ref.uri
    return repr(text if len(text) <= MAX_SHOWN_URI else text[: MAX_SHOWN_URI - 3] + "...")


def with_file(error: Fault, ref: MediaRef) -> Fault:
    """Returns an error that names the file of `ref`: a copy of one that does not, such as a
    decoder's, which other items of the same content may have too."""
    name = shown_uri(ref)
    if ref.scheme not in ("", "file") or name in str(error):
        return error
    own = type(error).__new__(type(error))
    own.__dict__.update(error.__dict__)
    own.args = (f"{error} ({ref.kind} file {name})",)
    return own
