"""The process of a remote desk: what it is told to do, and what it sends. Here in a thread."""

import threading
from queue import SimpleQueue

import pytest

from mmdeploy_llm.engine.desk.local import LocalDesk
from mmdeploy_llm.engine.desk.remote import Answered, Order, Output, Ready, _Server
from mmdeploy_llm.errors import EngineError, RequestError, WorkerDiedError


class FakeChannel:
    """Both directions as queues. The end of the channel would end this process, so that none
    comes: the daemon thread that reads waits on."""

    def __init__(self):
        self.orders, self.sent = SimpleQueue(), SimpleQueue()

    def receive(self):
        return self.orders.get()

    def send(self, value):
        self.sent.put(value)


class Served:
    """A server in a thread, and the exception that ends it."""

    def __init__(self, desk):
        self.channel, self.error = FakeChannel(), None
        self.server = _Server(self.channel, desk)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        assert isinstance(self.next(), Ready)

    def _serve(self):
        try:
            self.server.serve()
        except Exception as error:
            self.error = error

    def tell(self, method, *args):
        self.channel.orders.put(Order(method=method, args=args))

    def next(self):
        return self.channel.sent.get(timeout=60)

    def close(self):
        self.server._news.put(RuntimeError("the test has ended"))
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def served(desk):
    served = Served(desk)
    yield served
    served.close()


def test_a_prompt(served, ask):
    served.tell(_Server.submit, 3, ask("hello", request_id="a"), None)
    output = served.next()
    assert isinstance(output, Output)
    assert (output.number, output.is_last, output.error) == (3, True, None)
    assert (output.output.request_id, output.output.item) == ("a", None)
    assert served.server._tickets == {}


def test_a_prompt_that_is_refused(served, ask):
    def refuse():
        raise RequestError("no")

    served.tell(_Server.submit, 3, ask(refuse), None)
    output = served.next()
    assert isinstance(output.error, RequestError)
    assert output.output.error_code == 400


def test_an_abort(served, engine, ask):
    engine.stuck.add("long")
    served.tell(_Server.submit, 3, ask("long", stream=True), None)
    assert not served.next().is_last
    served.tell(_Server.abort, 3)
    while not (output := served.next()).is_last:
        pass
    assert output.output.error_code == 499


def test_calls_of_the_desk(served):
    def no_memory(desk):
        raise EngineError("no memory")

    def fault(desk):
        raise ZeroDivisionError("of a plugin")

    for number, method in enumerate((LocalDesk.stats, no_memory, fault)):
        served.tell(_Server.answer, number, method, ())
    answers = sorted((served.next() for _ in range(3)), key=lambda answer: answer.number)
    assert all(isinstance(answer, Answered) for answer in answers)
    assert answers[0].value.num_blocks == 9
    assert str(answers[1].error) == "no memory"
    assert "ZeroDivisionError: of a plugin" in str(answers[2].error)


def test_a_dead_engine_ends_the_process(served, engine, ask):
    """Its prompts may be computed elsewhere, so that none of them is sent as failed."""
    engine.stuck.add("long")
    served.tell(_Server.submit, 3, ask("long", stream=True), None)
    served.next()
    engine.death = WorkerDiedError("rank 1 has died")
    served.thread.join(60)
    assert served.error is engine.death


def test_a_closed_desk_ends_the_process(served, desk, ask):
    desk.close()
    served.tell(_Server.submit, 3, ask("late"), None)
    served.thread.join(60)
    assert isinstance(served.error, EngineError)
