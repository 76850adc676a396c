"""The n completions of a prompt become one output; see also test_ticket.py."""

from mmdeploy_llm.engine.desk.merge import merged
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)


def part(index, *, fault=None, **metrics):
    """One completion as the engine delivers it. fault: its error code and message."""
    code, message = fault or (200, None)
    completion = CompletionOutput(index=index, text=f"{index}", error_code=code, error_msg=message)
    return RequestOutput(
        request_id=f"0-{index}",
        prompt="p",
        outputs=Completions([completion]),
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0, **metrics),
        error_code=code,
        error_msg=message,
        num_cached_tokens=index,
    )


def test_errors_of_some_completions():
    parts = (part(0), part(1, fault=(500, "no")), part(2))
    whole = merged(parts)
    assert not whole.is_ok
    assert whole.error_code == 500
    assert whole.error_msg == "1 of 3 completions failed, first completion 1: no"
    assert [completion.error_msg for completion in whole.outputs] == [None, "no", None]


def test_errors_of_all_completions():
    same = merged([part(0, fault=(400, "no")), part(1, fault=(400, "no"))])
    assert (same.error_code, same.error_msg) == (400, "no")
    other = merged([part(0, fault=(400, "no")), part(1, fault=(500, "off"))])
    assert other.error_code == 400
    assert other.error_msg == "2 of 2 completions failed, first completion 0: no"


def test_metrics_cover_all_completions():
    times = {"model_execute_time": 9.0, "time_in_queue": 2.0, "preprocess_time": 0.5}
    whole = merged(
        [
            part(0, inference_start_time=10.0, first_token_time=3, model_forward_time=4, **times),
            part(1, inference_start_time=12.0, first_token_time=0.5, model_forward_time=5.0),
            part(2),
        ]
    )
    assert whole.request_id == "0-0"
    assert whole.num_cached_tokens == 0
    metrics = whole.metrics
    assert (metrics.arrival_time, metrics.inference_start_time) == (1.0, 10.0)
    assert metrics.first_token_time == 2.5  # at 12.5
    assert metrics.model_forward_time == 7.0  # until 17
    assert metrics.model_execute_time == 9.0
    assert (metrics.time_in_queue, metrics.preprocess_time) == (2.0, 0.5)
    assert merged([part(0), part(1), part(2)]).metrics.model_forward_time is None
