"""Actors with an engine each: as the workers of Ray Data, and as a pool that a batch feeds.

    driver:  dataset or ClusterLLM --blocks--> actors --answers--> driver or the next operator
                        DeathLedger (an actor beside the driver) <--begin, run, end-- actors

Ray starts an actor that died again, on any machine that can hold it, and gives it its blocks again.
Blocks are answered in several threads of an actor, so that the engine always has more than it
computes.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from mmdeploy_llm.client.llm import LLM
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.deaths import MAX_LOADS
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError, EngineError, MMDeployLLMError, RequestError
from mmdeploy_llm.values.closing import Closing
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams

from .blocks import BlockEngine, num_at_once
from .deaths import DeathLedger
from .rows import Columns, refusal
from .sizes import ActorSize, actor_size, num_beside_reading

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise ConfigError(
        'clusters need ray: pip install "mmdeploy-llm[ray]" on every machine of the cluster'
    ) from None

ROWS_PER_BLOCK = 64
LOCAL = "local"
Outcome = tuple[RequestOutput, Exception | None]  # of an ask, which the receiver has


def connect(address: str | None = None) -> None:
    """Connects this program to a Ray cluster, unless it is connected. address: HOST:PORT, "auto"
    for the cluster of this machine, "local" for a new one that ends with the program; None: as
    `ray.init()` decides. Raises ConfigError where there is none."""
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address,
            include_dashboard=False if address == LOCAL else None,
            log_to_driver=False,
            logging_level="warning",
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({str(error)[:200]}); `ray start --head` "
            "starts one, and --ray local one for this program alone"
        ) from None


class LedgerClient:
    """The ledger in its actor, called from workers. A copy that travels finds the actor by its
    name: it holds no reference, which Ray would have to restore when it starts an actor again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.handle = ray.get_actor(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LedgerClient, (self._name,)

    @classmethod
    def start(cls) -> LedgerClient:
        """Starts a ledger on the driver's machine, which ends when nobody needs it."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        name = f"deaths of rows {uuid.uuid4().hex}"
        actor = ray.remote(**options)(DeathLedger).options(name=name, scheduling_strategy=here)
        handle = actor.remote()  # held until `cls` holds it: an actor ends with its last handle
        client = cls(name)
        client.handle = handle
        return client

    def begin(self, block: str, num_rows: int) -> Sequence[int]:
        """See DeathLedger."""
        found: list[int] = ray.get(self.handle.begin.remote(block, num_rows))
        return found

    def run(self, block: str, rows: Sequence[int]) -> None:
        """See DeathLedger. Returns when it is written down."""
        ray.get(self.handle.run.remote(block, rows))

    def end(self, block: str) -> None:
        """See DeathLedger; does not wait."""
        self.handle.end.remote(block)

    def open(self, model: str, options: Mapping[str, Any]) -> LLM:
        """Loads a model in this actor. Raises EngineError when that has killed the actor again and
        again."""
        actor = ray.get_runtime_context().get_actor_id() or "driver"
        num_deaths = ray.get(self.handle.load.remote(actor))
        if num_deaths >= MAX_LOADS:
            raise EngineError(
                f"the process of an engine died {num_deaths} times while it loaded {model!r}: it "
                "needs more memory than its machine has, or a plugin ends it; see Ray's logs"
            )
        llm = LLM(model, **{"quiet": True, **options})
        self.handle.loaded.remote(actor)
        return llm


class LLMWorker:
    """A callable for `Dataset.map_batches`: an engine that answers the rows of blocks, for
    batch_format="pyarrow". `caption_dataset` uses it with the right resources.

    model, options: as for LLM. ledger: one for all workers of a dataset, LedgerClient.start().
    It may be called by several threads; a row that cannot be answered has its error in its columns.
    """

    def __init__(
        self,
        model: str,
        columns: Columns,
        ledger: LedgerClient,
        sampling_params: SamplingParams | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._columns = columns
        self._params = sampling_params or SamplingParams()
        self._engine = BlockEngine(ledger.open(model, options or {}), ledger)
        self._calls = _Calls()

    def __call__(self, table: Any) -> Any:
        """Returns the table (pyarrow.Table) with the columns of the answers."""
        self._columns.check(table.column_names)
        prompts = [self._columns.prompt_of(row) for row in table.to_pylist()]
        asks = [
            Ask(prompt=own, params=self._params)
            for own in prompts
            if not isinstance(own, RequestError)
        ]
        found = iter(self._engine.answer(self._calls.name_of_next(), asks))
        answers = [
            refusal(own) if isinstance(own, RequestError) else next(found) for own in prompts
        ]
        more = type(table).from_pydict(self._columns.columns_of(answers)).slice(1)
        for name in more.column_names:
            table = table.append_column(more.schema.field(name), more.column(name))
        return table


class _Calls:
    """Names the calls of an actor: by Ray's task, whose id stays when Ray runs it again, and the
    number of the call in it."""

    def __init__(self) -> None:
        self._local = threading.local()

    def name_of_next(self) -> str:
        """Returns the name of the call that begins in this thread."""
        task = ray.get_runtime_context().get_task_id() or ""
        last, number = getattr(self._local, "last", ("", 0))
        number = number + 1 if last == task else 0
        self._local.last = task, number
        return f"{task}:{number}"


def caption_dataset(
    dataset: Any,
    *,
    model: str,
    prompt: str,
    image_column: str | None = None,
    video_column: str | None = None,
    audio_column: str | None = None,
    media_column: Mapping[str, str | Sequence[str]] | None = None,
    concurrency: int | None = None,
    rows_per_block: int | None = ROWS_PER_BLOCK,
    output_prefix: str = "",
    sampling_params: SamplingParams | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Returns the dataset with a model's answer about each row, computed when it is read or
    written: the columns text, reasoning, finish_reason, outcome, num_*_tokens, and error_code,
    error_class and error_message, which are None where there is an answer.

    dataset: a ray.data.Dataset. prompt, output_prefix, columns with media: see Columns.
    concurrency: engines; None: as many as the cluster holds, with a CPU left for reading.
    rows_per_block: rows that are answered, retried and checkpointed together; None: the dataset's
    own blocks. options: of LLM; with num_threads an engine takes as many CPUs, with
    tensor_parallel_size as many GPUs. Raises what LLM raises for wrong ones.
    """
    columns = Columns(
        prompt=prompt,
        image_column=image_column,
        video_column=video_column,
        audio_column=audio_column,
        media_column=media_column or {},
        output_prefix=output_prefix,
        chat_template_kwargs=chat_template_kwargs or {},
    )
    connect()
    size = actor_size(model, options, has_gpus="GPU" in ray.cluster_resources())
    arguments = {
        "model": model,
        "columns": columns,
        "ledger": LedgerClient.start(),
        "sampling_params": sampling_params,
        "options": size.options,
    }
    num_actors = concurrency or num_beside_reading(size, list(_nodes()))
    return _mapped(dataset, arguments, size, num_actors, rows_per_block)


def _mapped(
    dataset: Any,
    arguments: Mapping[str, Any],
    size: ActorSize,
    num_actors: int,
    num_rows: int | None,
) -> Any:
    """Returns the dataset that LLMWorkers with these arguments make of another. num_rows: of a
    block."""
    if num_rows is not None:
        dataset = dataset.repartition(target_num_rows_per_block=num_rows)
    at_once = num_at_once(size.num_seqs, num_rows or ROWS_PER_BLOCK)
    return dataset.map_batches(
        LLMWorker,
        fn_constructor_kwargs=dict(arguments),
        batch_size=num_rows,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=num_actors,
            max_concurrent_calls_per_actor=at_once,
            max_tasks_in_flight_per_actor=2 * at_once,
            enable_true_multi_threading=True,
        ),
        **size.resources,
    )


def _nodes() -> Iterator[Mapping[str, float]]:
    """Yields the resources of each machine of the cluster."""
    for node in ray.nodes():
        if node["Alive"]:
            yield node["Resources"]


class PoolActor:
    """An engine of a ClusterLLM, in an actor. It is loaded when it is first needed: an actor that
    Ray starts again is told nothing but its blocks."""

    def __init__(
        self, model: str, options: Mapping[str, Any], ledger: LedgerClient, folder: str
    ) -> None:
        """folder: the driver's working folder, of relative paths."""
        with suppress(OSError):  # a machine without it answers such paths with errors
            os.chdir(folder)
        self._open: Callable[[], BlockEngine] = lambda: BlockEngine(
            ledger.open(model, options), ledger
        )
        self._lock = threading.Lock()
        self._engine: BlockEngine | None = None

    def ready(self) -> None:
        """Returns when the model is loaded."""
        self._loaded()

    def answer(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Answers a block, in the order of its asks."""
        task = ray.get_runtime_context().get_task_id() or ""
        found = self._loaded().answer(task, asks)
        return [(replace(answer.output, item=None), answer.error) for answer in found]

    def _loaded(self) -> BlockEngine:
        with self._lock:
            if self._engine is None:
                self._engine = self._open()
            return self._engine


class ClusterLLM(Closing):
    """Answers one batch with engines on all machines of a Ray cluster, as many as it holds now.

    address: see `connect`. model, options: as for LLM. Media in prompts travel where they are
    bytes; paths must be readable on every machine. Use it in a `with` block, which raises what LLM
    raises when the model cannot be loaded.

    num_actors: the engines.
    """

    def __init__(self, model: str, *, address: str | None = None, **options: Any) -> None:
        connect(address)
        size = actor_size(model, options, has_gpus="GPU" in ray.cluster_resources())
        self.num_actors = size.num_in(_nodes())
        self._num_rows = max(1, size.num_seqs // 4)
        self._at_once = num_at_once(size.num_seqs, self._num_rows)
        self._is_used = False
        self._ledger = LedgerClient.start()
        kind = ray.remote(
            **size.resources,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=self._at_once,
            allow_out_of_order_execution=True,
        )(PoolActor)
        self._actors = [
            kind.remote(model, size.options, self._ledger, os.getcwd())
            for _ in range(self.num_actors)
        ]

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields results in the order in which their blocks end, each with its ask. Asks are taken
        as actors have capacity for them. May be called once: an actor without work ends."""
        if self._is_used:
            raise EngineError("these engines have answered their batch; make another ClusterLLM")
        self._is_used = True
        yield from _Run(self._actors, self._at_once, self._num_rows, asks).answers()

    def close(self) -> None:
        """Ends the engines."""
        for actor in [*self._actors, self._ledger.handle]:
            ray.kill(actor)

    def __enter__(self) -> Self:
        """Waits until one engine is loaded."""
        try:
            (first, *_), _ = ray.wait([actor.ready.remote() for actor in self._actors])
            _result_of(first)
        except BaseException:
            self.close()
            raise
        return self


class _Run:
    """One call of a ClusterLLM. Used by one thread."""

    def __init__(
        self, actors: Sequence[Any], at_once: int, num_rows: int, asks: Iterable[Ask]
    ) -> None:
        self._at_once, self._num_rows = at_once, num_rows
        self._asks = iter(asks)
        self._free = {actor: at_once for actor in actors}
        self._blocks: dict[Any, tuple[Any, list[Ask]]] = {}  # by result: its actor, its asks
        self._is_over = False

    def answers(self) -> Generator[Answer, None, None]:
        """Yields the answers. Raises the error of an engine that cannot load its model."""
        self._fill()
        while self._blocks:
            (result, *_), _ = ray.wait(list(self._blocks))
            found = _result_of(result)
            actor, asks = self._blocks.pop(result)
            self._free[actor] += 1
            self._fill()
            for ask, (output, error) in zip(asks, found, strict=True):
                yield Answer(ask=ask, output=output, error=error)

    def _fill(self) -> None:
        """Gives blocks to the actors that can take one, to the emptiest first. Ends actors that
        have no more work: one that died may need the place."""
        while not self._is_over and max(self._free.values()):
            block = list(islice(self._asks, self._num_rows))
            if not block:
                self._is_over = True
                break
            actor = max(self._free, key=self._free.__getitem__)
            self._free[actor] -= 1
            result = actor.answer.remote([replace(ask, item=None) for ask in block])
            self._blocks[result] = actor, block
        if self._is_over:
            self._release()

    def _release(self) -> None:
        idle = [actor for actor, free in self._free.items() if free == self._at_once]
        for actor in idle:
            del self._free[actor]
            ray.kill(actor)


def _result_of(result: Any) -> Any:
    """Returns the value of a result. Raises the error of ours that was raised there."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, MMDeployLLMError):
            raise error.cause from None
        raise
