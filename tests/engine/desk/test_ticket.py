"""A ticket on its own: what is unread is joined, n completions become one output."""

import threading

import pytest

from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.ticket import Ticket
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.request_output import ToolCall
from mmdeploy_llm.values.params import SamplingParams

from .conftest import output_of


def part(index=0):
    name = f"r-{index}" if index else "r"
    return Request(
        request_id=name, prompt="p", prompt_token_ids=[1], params=SamplingParams(), index=index
    )


@pytest.fixture
def news():
    return []


@pytest.fixture
def make(news):
    def make(n=1, stream=True):
        ask = Ask(prompt="p", params=SamplingParams(n=n), stream=stream, request_id="r")
        return Ticket(ask, 7, abort=news.append, on_news=news.append)

    return make


def test_the_five_states(make):
    ticket = make()
    states = [ticket.status]
    for text, finished in (("a", False), ("b", False), ("", True)):
        ticket.put(output_of(part(), text=text, finished=finished))
        states.append(ticket.status)
    assert states == ["init", "context_finished", "generating", "finished"]
    assert ticket.generated_length == 2
    broken = make()
    broken.put(output_of(part(), code=499, message="aborted"))
    assert broken.status == "interrupted"


def test_unread_deltas_are_joined(make, news):
    """The reader is told once until it has read everything."""
    ticket = make()
    for letter in "abc":
        ticket.put(output_of(part(), text=letter, finished=False))
    assert news == [ticket]
    delta = ticket.get_nowait()
    assert (delta.outputs.text, delta.outputs.token_ids) == ("abc", [97, 98, 99])
    assert ticket.get_nowait() is None
    ticket.put(output_of(part(), text="d", finished=False))
    ticket.put(output_of(part(), text="e"))
    assert news == [ticket] * 3  # at the end too
    assert ticket.is_done
    assert not ticket.is_over
    last = ticket.get(1)
    assert (last.outputs.text, last.finished, last.outputs.finish_reason) == ("de", True, "stop")
    assert ticket.get(1) is None
    assert ticket.is_over


def test_deltas_are_numbered_in_the_order_in_which_they_are_read(make):
    """Joined deltas count as one, so no number is left out."""
    ticket = make(n=2)
    found = {0: [], 1: []}
    for sent, num_new in enumerate([1, 3, 1, 2]):
        for index in (0, 1):
            for each in range(num_new):
                delta = output_of(part(index), text="x", finished=sent == 3 and each == 1)
                ticket.put(delta)
        while (delta := ticket.get_nowait()) is not None:
            found[delta.outputs.index].append((delta.outputs.send_idx, delta.outputs.text))
    assert found[0] == found[1] == [(0, "x"), (1, "xxx"), (2, "x"), (3, "xx")]


def test_an_error_is_not_joined(make):
    """A parser that raises repeats the whole text in its error."""
    ticket = make()
    ticket.put(output_of(part(), text="ab", finished=False))
    ticket.put(output_of(part(), text="abc", code=500, message="parser"))
    assert [ticket.get_nowait().outputs.text for _ in range(2)] == ["ab", "abc"]
    assert ticket.generated_length == 2


def test_all_fields_of_deltas_are_joined(make):
    from dataclasses import replace

    from mmdeploy_llm.values.outputs.request_output import Completions

    ticket = make()
    for index, (reasoning, calls, logprobs) in enumerate(
        [
            ("x", None, ({97: 1},)),
            (None, (ToolCall(name="f", arguments=""),), ({98: 2},)),
            ("y",) * 3,
        ]
    ):
        output = output_of(part(), text="ab"[index : index + 1], finished=False)
        calls, logprobs = (None, None) if calls == "y" else (calls, logprobs)
        completion = replace(
            output.outputs[0],
            reasoning_content=reasoning,
            tool_calls=calls,
            logprobs=logprobs,
            send_idx=index,
        )
        ticket.put(replace(output, outputs=Completions([completion])))
    (found,) = ticket.get_nowait().outputs
    assert (found.reasoning_content, found.logprobs) == ("xy", ({97: 1}, {98: 2}))
    assert [call.name for call in found.tool_calls] == ["f"]
    assert found.send_idx == 0


def test_n_completions_are_one_output(make):
    ticket = make(n=3, stream=False)
    for index in (2, 0, 1):
        assert ticket.get_nowait() is None
        ticket.put(output_of(part(index), text=str(index)))
    whole = ticket.get_nowait()
    assert [each.text for each in whole.outputs] == ["0", "1", "2"]
    assert whole.request_id == "r"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_deltas_of_all_completions_have_one_request_id(make, order):
    ticket = make(n=2)
    for finished in (False, True):
        for index in order:
            ticket.put(output_of(part(index), text="x", finished=finished))
            assert ticket.is_done == (finished and index == order[1])
    found = [ticket.get_nowait() for _ in range(2)]
    assert [output.request_id for output in found] == ["r", "r"]
    assert [(output.outputs.index, output.outputs.text) for output in found] == [
        (index, "xx") for index in order
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_what_had_finished_is_kept_at_the_end(make, stream):
    ticket = make(n=2, stream=stream)
    ticket.put(output_of(part(1), text="done"))
    ticket.end(EngineError("rank 1 died"))
    outputs = [ticket.get_nowait() for _ in range(2 if stream else 1)]
    found = sorted(
        (each for output in outputs for each in output.outputs), key=lambda each: each.index
    )
    assert [each.error_code for each in found] == [500, 200]
    assert found[1].text == "done"
    assert ticket.status == "interrupted"


def test_a_reader_waits(make):
    ticket = make()
    with pytest.raises(TimeoutError, match=r"no output within 0\.01 s"):
        ticket.get(0.01)
    timer = threading.Timer(0.05, ticket.put, [output_of(part(), text="a")])
    timer.start()
    assert ticket.get().outputs.text == "a"
    timer.join()


def test_an_abort_is_passed_on(make, news):
    make().abort()
    assert news == [7]
