"""Settings and results of a measurement. Times in seconds, memory in bytes."""

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
    """The settings of one measurement.

    options: keyword arguments of LLM.
    begun: time.perf_counter() at the start of the program.
    """

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
    """Latency of a request that runs alone.

    first_token: seconds to the first token.
    per_output_token: seconds per further token.
    """

    first_token: float
    per_output_token: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory in bytes.

    peak: of the process; on CUDA, of tensors.
    kv_cache: peak of the blocks in use.
    weights: None when the model's cost is unknown.
    """

    peak: int
    kv_cache: int
    weights: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The machine's limit for a round.

    seconds: lower bound for the round's matrix products with weights.
    share: `seconds` as a fraction of the round's measured time.
    """

    machine: Machine
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that was measured.

    load_to_first_token: seconds from the start of the program, imports included.
    limit: the limit of the last round; None for a model of unknown cost.
    """

    work: WorkName
    model: str
    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_num_seqs: int
    num_requests: int
    num_threads: int
    rounds: tuple[Round, ...]
    load_to_first_token: float
    alone: Alone
    memory: Memory
    limit: Limit | None
    profile: Profile | None

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens per second, median of the rounds."""
        return median(done.num_output_tokens / done.seconds for done in self.rounds)

    @property
    def images_per_second(self) -> float:
        """Images per second, median of the rounds."""
        return median(done.num_images / done.seconds for done in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the two rates as nested dicts, for JSON."""
        rates = {
            "output_tokens_per_second": self.output_tokens_per_second,
            "images_per_second": self.images_per_second,
        }
        return {**asdict(self), **rates}
