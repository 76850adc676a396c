"""StepDraft: the plan of one step while it is being built."""

from __future__ import annotations

from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens


class StepDraft:
    """The work of one step, within its token budget. The scheduler is the only writer."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens_left = num_tokens
        self.new: list[NewRequest] = []
        self._decodes: list[ScheduledTokens] = []
        self._prefills: list[ScheduledTokens] = []

    def add(self, item: ScheduledTokens) -> None:
        """Schedules `item`; its tokens must fit the remaining budget."""
        assert 0 < item.num_tokens <= self.num_tokens_left, f"{item} over the token budget"
        self.num_tokens_left -= item.num_tokens
        is_decode = item.num_tokens == 1 and item.samples
        (self._decodes if is_decode else self._prefills).append(item)

    @property
    def scheduled(self) -> tuple[ScheduledTokens, ...]:
        """All items; those that compute one token and sample come first."""
        return (*self._decodes, *self._prefills)
