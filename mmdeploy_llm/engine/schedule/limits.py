"""The scheduler's limits (SchedulerConfig), and the requests that could never run within them."""

from __future__ import annotations

from dataclasses import dataclass

from mmdeploy_llm.errors import MediaLimitError, OutOfBlocksError, PromptTooLongError, RequestError
from mmdeploy_llm.request import Request, RequestStatus
from mmdeploy_llm.values.plan import NUM_FIXED, RequestFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits. Sizes in tokens; num_blocks in KV cache blocks of block_size tokens.

    max_num_batched_tokens: tokens computed in one step, decode and prefill together.
    max_idle_blocks: blocks that may keep content which no request uses (None: all).
    encoder_cache_tokens: encoder outputs held at the same time.
    atomic_media: tokens of a media item without text between them must be computed in one step.
    num_state_rows: rows of states, fixed ones included, at least two for each of max_num_seqs; 0
        for a model without states. max_idle_states: rows that may keep states that no request uses.
    speculates: whether decode steps try tokens: those that repeat earlier ones, or, if
        has_draft_head, those that the runner guesses.
    window: tokens that the layers with a window attend to, the longest of them; None: no layer has
        one. num_window_blocks: KV cache blocks for these layers, which have block tables of their
        own. max_idle_window_blocks: as max_idle_blocks.
    long_after: a sequence that gets more tokens is computed again, since the model computes all its
        tokens in another way then (longrope); None: no length changes the model.
    max_adapters, adapter_bytes: adapters in memory, and their bytes together; None: any.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    max_idle_blocks: int | None = None
    enable_chunked_prefill: bool = True
    encoder_cache_tokens: int = 1
    atomic_media: bool = False
    num_state_rows: int = 0
    max_idle_states: int = 0
    speculates: bool = False
    has_draft_head: bool = False
    window: int | None = None
    num_window_blocks: int = 0
    max_idle_window_blocks: int | None = None
    long_after: int | None = None
    max_adapters: int = 1
    adapter_bytes: int | None = None

    def __post_init__(self) -> None:
        # runtime_config.resolve ensures both; a step must reach every running request.
        assert self.max_num_batched_tokens >= self.max_num_seqs
        assert self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len
        least = NUM_FIXED + 2 * self.max_num_seqs + self.max_idle_states
        assert self.num_state_rows == 0 or self.num_state_rows >= least

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the whole KV cache in tokens."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def refusal(request: Request, config: SchedulerConfig) -> RequestFailure | None:
    """Returns why `request` could never run, however long it waits; None when it can."""
    error = _length_error(request, config)
    if error is None and request.media:
        error = _media_error(request, config)
    return RequestFailure(code=error.code, message=str(error)) if error else None


def overgrowth(request: Request, config: SchedulerConfig) -> RequestFailure:
    """Returns why a request ends that needs more blocks than there are."""
    return RequestFailure(
        code=OutOfBlocksError.code,
        message=f"the request has {request.num_tokens} tokens and needs another block, but holds "
        f"the whole KV cache of {config.num_blocks} blocks of {config.block_size} tokens already; "
        "lower max_tokens or raise kv_cache_memory",
    )


def lateness(request: Request) -> RequestFailure:
    """Returns why a request ends whose deadline has passed, with the state that it was in."""
    assert request.deadline is not None
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if num_output:
        state = f"it had generated {num_output} tokens"
    elif request.status is RequestStatus.WAITING:
        state = "it waited to start"
    else:
        state = f"{request.num_computed_tokens} of its {num_prompt} prompt tokens were computed"
    error = request.deadline.error(state)
    return RequestFailure(code=error.code, message=str(error))


def _length_error(request: Request, config: SchedulerConfig) -> RequestError | None:
    num_prompt = len(request.prompt_token_ids)
    num_output = max(1, request.params.min_tokens) if request.wanted is None else 0
    if num_prompt == 0:
        return RequestError("the prompt has no tokens; give at least one")
    tokens = f"{num_prompt} prompt tokens"
    if num_output:
        tokens += f" and at least {num_output} generated ones"
    if num_prompt + num_output > config.max_model_len:
        return PromptTooLongError(
            f"{tokens} are more than "
            f"max_model_len = {config.max_model_len}; shorten the prompt or raise max_model_len"
        )
    # The last token is never fed back.
    if num_prompt + max(0, num_output - 1) > config.num_kv_tokens:
        return PromptTooLongError(
            f"{tokens} do not fit the "
            f"KV cache of {config.num_blocks} blocks of {config.block_size} tokens; shorten the "
            "prompt or raise kv_cache_memory"
        )
    return None


def _media_error(request: Request, config: SchedulerConfig) -> RequestError | None:
    sizes = {span.item.key: span.item.num_tokens for span in request.media}
    largest = max(sizes.values())
    if largest > config.encoder_cache_tokens:
        return MediaLimitError(
            f"a media item has {largest} tokens, the encoder cache holds "
            f"{config.encoder_cache_tokens}; use a smaller one or raise encoder_cache_memory"
        )
    runs = (last - first for span in request.media for first, last in span.runs)
    if config.atomic_media and (longest := max(runs, default=0)) > config.max_num_batched_tokens:
        return MediaLimitError(
            f"a media item has {longest} tokens, which this model must compute in one step of "
            f"{config.max_num_batched_tokens}; use a smaller one or raise max_num_batched_tokens"
        )
    is_outside = request.has_media_outside
    is_together = is_outside or not config.enable_chunked_prefill
    if is_together and sum(sizes.values()) > config.encoder_cache_tokens:
        return MediaLimitError(
            f"the media of the prompt have {sum(sizes.values())} tokens, needed in one step "
            f"{'by this model' if is_outside else 'without chunked prefill'}, and the encoder "
            f"cache holds {config.encoder_cache_tokens}; use fewer, raise encoder_cache_memory"
            f"{'' if is_outside else ' or set enable_chunked_prefill=True'}"
        )
    return None
