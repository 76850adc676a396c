"""tokens_to_border: chunks of a prompt end where states can be kept for later prompts.

    system prompt . . . | <image A> . . . | question . . . end
                        ^ kept            ^ if far enough  ^ kept

All borders are ends of blocks: a prefix hit needs the blocks and the state at the same token.
"""

from __future__ import annotations

from .chunks import whole_runs_end
from .limits import SchedulerConfig
from .state import RequestState

MIN_TOKENS = 256  # between two media borders: each costs a step


def tokens_to_border(
    state: RequestState, start: int, num_tokens: int, config: SchedulerConfig
) -> int:
    """Returns how many tokens from `start` on to compute in a step, at most num_tokens: up to the
    next border, else to the last end of a block, if the prompt goes on after it."""
    request, size = state.request, config.block_size
    if not config.enable_prefix_caching or not config.enable_chunked_prefill:
        return num_tokens
    last = (len(request.prompt_token_ids) - 1) // size * size
    borders = [state.shared_end, last]
    for span in request.media:
        border = span.offset // size * size
        if border > start and (start == 0 or border - start >= MIN_TOKENS):
            borders.append(border)
            break
    following = min((border for border in borders if border > start), default=None)
    end = min(start + num_tokens, request.num_tokens)
    if following is not None and following <= end:
        end = following
    elif end < request.num_tokens and end // size * size > start:
        end = end // size * size
    else:
        return num_tokens
    if config.atomic_media:
        end = whole_runs_end(request, start, end)
    return end - start if end > start else num_tokens
