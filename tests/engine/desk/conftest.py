"""A local desk with a fake engine and a fake intake."""

import threading
from types import SimpleNamespace

import pytest

from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.local import LocalDesk
from mmdeploy_llm.layers.pooling.abilities import GENERATES
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.metrics import EngineStats
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams


def output_of(request, *, text="", finished=True, code=200, message=None, **fields):
    """One output of a request, with one token for each character."""
    completion = CompletionOutput(
        index=request.index,
        text=text,
        token_ids=[ord(letter) for letter in text],
        finish_reason=("stop" if code == 200 else "error") if finished else None,
        error_code=code,
        error_msg=message,
    )
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        item=request.item,
        outputs=Completions([completion]),
        finished=finished,
        metrics=RequestMetrics(arrival_time=0.0),
        error_code=code,
        error_msg=message,
        **fields,
    )


class FakeEngine:
    """Ends every request in the step after its arrival, the newest first. A stuck prompt goes on,
    with a letter for each step, until it is aborted or let go."""

    def __init__(self):
        self.info = SimpleNamespace(num_blocks=9)
        self.requests, self.aborted, self.stuck = {}, [], set()
        self.most = self.num_steps = 0
        self.death = None
        self.is_closed = False

    @property
    def has_work(self):
        return bool(self.requests)

    def add(self, request):
        self.requests[request.request_id] = request
        self.most = max(self.most, len(self.requests))

    def abort(self, request_ids):
        self.aborted += request_ids

    def close(self):
        self.is_closed = True

    def stats(self):
        numbers = dict.fromkeys(EngineStats.__slots__, 0)
        return EngineStats(**{**numbers, "num_running": len(self.requests), "num_blocks": 9})

    def step(self):
        self.num_steps += 1
        outputs = []
        for request in reversed(list(self.requests.values())):
            if request.request_id in self.aborted:
                outputs.append(output_of(request, code=499, message="aborted"))
            elif self.death is not None:
                outputs.append(output_of(request, code=500, message=str(self.death)))
            elif request.prompt not in self.stuck:
                outputs.append(output_of(request, text="."))
            elif request.stream:
                outputs.append(output_of(request, text="x", finished=False))
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return tuple(outputs)


class FakeIntake:
    """Makes the requests of a prompt, which may be a function that is called first."""

    media = None

    def __init__(self):
        self.order, self.is_interrupted = [], threading.Event()

    def accept(
        self,
        prompt,
        params,
        *,
        item,
        where,
        stream,
        number,
        request_id,
        priority,
        deadline,
        is_shared,
        wanted,
        adapter,
    ):
        self.order.append(number)
        if callable(prompt):
            prompt = prompt()
        elif isinstance(prompt, dict):
            prompt = prompt["prompt"]
        return tuple(
            Request(
                request_id=f"{request_id}-{index}" if index else request_id,
                prompt=prompt,
                item=item,
                prompt_token_ids=[1],
                params=params,
                index=index,
                stream=stream,
                priority=priority,
                deadline=deadline,
                is_shared=is_shared,
                wanted=wanted,
            )
            for index in range(params.n)
        )

    def interrupt(self):
        self.is_interrupted.set()

    def close(self):
        pass


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def intake():
    return FakeIntake()


@pytest.fixture
def open_desk(engine, intake):
    desks = []

    def open_one(**runtime):
        options = SimpleNamespace(default_adapter="")
        sizes = {"max_num_seqs": 2, "num_intake_threads": 1, **runtime}
        runtime = SimpleNamespace(options=options, **sizes)
        assembly = SimpleNamespace(
            engine=engine,
            intake=intake,
            model=None,
            plugins=None,
            adapters=None,
            runtime=runtime,
            abilities=GENERATES,
        )
        desks.append(LocalDesk(lambda: assembly))
        return desks[-1]

    yield open_one
    for desk in desks:
        desk.close()


@pytest.fixture
def desk(open_desk):
    return open_desk()


@pytest.fixture
def ask():
    def make(prompt, n=1, **fields):
        return Ask(prompt=prompt, params=SamplingParams(n=n), **fields)

    return make
