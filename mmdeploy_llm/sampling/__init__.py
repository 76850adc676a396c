"""From logits to the next token of every request, vectorised over the batch."""

from .grammar import GrammarBackend
from .logprobs import prompt_logprobs
from .sampler import Sampler, SampleResult
from .state import SlotRequest

__all__ = ["GrammarBackend", "SampleResult", "Sampler", "SlotRequest", "prompt_logprobs"]
