"""Says which rules of a request together allow no next token."""

from __future__ import annotations

from mmdeploy_llm.hooks.names import listing

from .results import NOTHING_ALLOWED
from .state import SlotState

MAX_SHOWN = 8  # tokens in a message


def why_nothing(state: SlotState | None, vocab_size: int) -> str:
    """Returns why no token may come next. state: of the request; None without trackers."""
    guide = None if state is None else state.grammar
    if state is None or guide is None or not guide.is_answering:
        return NOTHING_ALLOWED
    allowed, bans = guide.allowed(vocab_size), _bans(state)
    if not allowed or not bans:
        return NOTHING_ALLOWED
    shown = listing([repr(text) for text in allowed[:MAX_SHOWN]])
    more = f" and {len(allowed) - MAX_SHOWN} more" if len(allowed) > MAX_SHOWN else ""
    hint = ""
    if state.processors:
        hint = " (rules of the model itself are in its generation_config.json: suppress_tokens)"
    return (
        f"no token is allowed next: guided_decoding allows only {shown}{more} after what is "
        f"written, banned by {listing(bans)}; give a constraint that does without these "
        f"characters, or loosen the other rule{hint}"
    )


def _bans(state: SlotState) -> list[str]:
    """Names the rules of a request that can ban what its constraint allows."""
    has_words = len(state.banned_ids) > 0 or state.bad_sequences is not None
    named = {
        "bad_words": has_words,
        "no_repeat_ngram_size": state.ngrams is not None,
        "min_tokens": (state.params.min_tokens or 0) > 1,
        "logit_bias": len(state.bias_ids) > 0,
    }
    own = [f"logits processor {one.built.name}" for one in state.processors]
    return [*own, *(name for name, is_used in named.items() if is_used)]
