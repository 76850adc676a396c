"""The n completions of a prompt become one output; nothing of them is lost and none is kept."""

import itertools
import random

import pytest

from mmdeploy_llm.desk.merge import Merger, deltas, whole_outputs
from mmdeploy_llm.desk.outcome import Job, JobOutput
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.outputs import CompletionOutput, Completions, RequestMetrics, RequestOutput


def job(index, n):
    return Job(index=index, prompt=f"p{index}", num_outputs=n, accept=tuple)


def part(job, index, *, fault=None, finished=True, error=None, **metrics):
    """One completion as the engine delivers it. fault: its error code and message."""
    code, message = fault or (200, None)
    completion = CompletionOutput(
        index=index, text=f"{job.index}.{index}", error_code=code, error_msg=message
    )
    output = RequestOutput(
        request_id=f"{job.index}-{index}",
        prompt=job.prompt,
        outputs=Completions([completion]),
        finished=finished,
        metrics=RequestMetrics(arrival_time=1.0, **metrics),
        error_code=code,
        error_msg=message,
        num_cached_tokens=index,
    )
    return JobOutput(job=job, output=output, error=error)


def merged(*parts):
    (whole,) = whole_outputs(item for item in parts)
    return whole


def test_any_order_gives_the_same_outputs():
    jobs = [job(index, n) for index, n in enumerate((1, 3, 2, 4))]
    parts = [part(one, index) for one in jobs for index in range(one.num_outputs)]
    expected = {one.index: [f"{one.index}.{k}" for k in range(one.num_outputs)] for one in jobs}
    for seed in range(20):
        random.Random(seed).shuffle(parts)
        found = {
            item.job.index: [completion.text for completion in item.output.outputs]
            for item in whole_outputs(item for item in parts)
        }
        assert found == expected


def test_only_unfinished_prompts_are_held():
    merger = Merger()
    for index in range(200):
        own = job(index, 3)
        whole = [merger.add(part(own, sample)) for sample in (2, 0, 1)]
        assert whole[:2] == [None, None]
        assert [completion.index for completion in whole[2].output.outputs] == [0, 1, 2]
        assert not merger._parts


def test_a_completion_keeps_its_first_output():
    """The rest of a prompt comes as errors when the engine dies; what had finished stays."""
    merger, own = Merger(), job(0, 2)
    assert merger.add(part(own, 1)) is None
    lost = [part(own, index, fault=(500, "the engine died")) for index in (0, 1)]
    whole = merger.add(lost[0]).output
    assert [completion.error_code for completion in whole.outputs] == [500, 200]
    assert whole.outputs[1].text == "0.1"


def test_errors_of_some_completions():
    own = job(0, 3)
    error = MediaError("cause")
    parts = (part(own, 0), part(own, 1, fault=(500, "no"), error=error), part(own, 2))
    whole = merged(*parts)
    assert whole.error is error
    assert not whole.output.is_ok
    assert whole.output.error_code == 500
    assert whole.output.error_msg == "1 of 3 completions failed, first completion 1: no"
    assert [completion.error_msg for completion in whole.output.outputs] == [None, "no", None]


def test_errors_of_all_completions():
    own = job(0, 2)
    same = merged(part(own, 0, fault=(400, "no")), part(own, 1, fault=(400, "no"))).output
    assert (same.error_code, same.error_msg) == (400, "no")
    other = merged(part(own, 0, fault=(400, "no")), part(own, 1, fault=(500, "off"))).output
    assert other.error_code == 400
    assert other.error_msg == "2 of 2 completions failed, first completion 0: no"


def test_metrics_cover_all_completions():
    own = job(0, 3)
    times = {"model_execute_time": 9.0, "time_in_queue": 2.0, "preprocess_time": 0.5}
    whole = merged(
        part(own, 0, inference_start_time=10.0, first_token_time=3, model_forward_time=4, **times),
        part(own, 1, inference_start_time=12.0, first_token_time=0.5, model_forward_time=5.0),
        part(own, 2),
    ).output
    assert whole.request_id == "0-0"
    assert whole.num_cached_tokens == 0
    metrics = whole.metrics
    assert (metrics.arrival_time, metrics.inference_start_time) == (1.0, 10.0)
    assert metrics.first_token_time == 2.5  # at 12.5
    assert metrics.model_forward_time == 7.0  # until 17
    assert metrics.model_execute_time == 9.0
    assert (metrics.time_in_queue, metrics.preprocess_time) == (2.0, 0.5)
    assert (
        merged(part(own, 0), part(own, 1), part(own, 2)).output.metrics.model_forward_time is None
    )


def test_closing_closes_the_source():
    closed = []

    def endless():
        try:
            for index in itertools.count():
                yield part(job(index, 1), 0)
        finally:
            closed.append(True)

    items = whole_outputs(endless())
    next(items)
    items.close()
    assert closed == [True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_deltas_of_one_prompt_have_one_request_id(order):
    jobs = [job(0, 2), job(1, 2)]
    source = [
        part(one, index, finished=finished)
        for finished in (False, True)
        for index in order
        for one in jobs
    ]
    found = list(deltas(item for item in source))
    assert [len(output.outputs) for output in found] == [1] * 8
    assert [output.outputs.index for output in found] == [
        item.output.outputs.index for item in source
    ]
    assert [output.request_id for output in found] == [f"{n}-{order[0]}" for n in (0, 1)] * 4
