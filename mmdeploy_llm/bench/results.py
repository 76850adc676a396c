"""What is asked of a measurement, and what comes out of it. Times in seconds, memory in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .machine import Machine
from .profile import Profile
from .works import WorkName


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure. options: of LLM. begun: when the program was started, by
    time.perf_counter."""

    work: WorkName
    model: str
    options: Mapping[str, Any]
    num_requests: int
    num_rounds: int
    is_profiled: bool
    begun: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pass over all requests."""

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_images: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Seconds of a request that nothing runs beside: until its first token, and for each token
    behind it."""

    first_token: float
    per_output_token: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes. peak: of the process (on CUDA: of tensors). kv_cache: of blocks in use at once, at
    most. weights: None when the model's cost is not known."""

    peak: int
    kv_cache: int
    weights: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """seconds: least time of a round's products with weights on this machine. share: of the
    round's time."""

    machine: Machine
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that was measured. load_to_first_token: seconds from the start of the program,
    imports included. limit: of the last round; None for models whose cost is not known."""

    work: WorkName
    model: str
    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_num_seqs: int
    num_threads: int
    rounds: tuple[Round, ...]
    load_to_first_token: float
    alone: Alone
    memory: Memory
    limit: Limit | None
    profile: Profile | None

    @property
    def output_tokens_per_second(self) -> float:
        """Median of the rounds."""
        return median(part.num_output_tokens / part.seconds for part in self.rounds)

    @property
    def images_per_second(self) -> float:
        """Median of the rounds."""
        return median(part.num_images / part.seconds for part in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values."""
        rates = {
            "output_tokens_per_second": self.output_tokens_per_second,
            "images_per_second": self.images_per_second,
        }
        return {**asdict(self), **rates}
