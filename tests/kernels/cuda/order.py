"""The order of work on an emulated card: streams, events, recordings, and the memory that they use.

Order is kept in vector clocks: a stream counts the work that it was given, and knows how far it and
the host have waited for the others."""

import itertools


class Memory:
    """The memory of a tensor and its views: which streams use it, and until when."""

    def __init__(self, card, storage):
        self.card, self.storage, self.stream = card, storage, card.stream
        self.size, self.write, self.uses, self.recorded = storage.nbytes(), None, {}, set()
        self.is_graphs = card.recording is not None  # a graph keeps its memory
        card.take(self.size)

    def __del__(self):
        self.card.allocated -= self.size
        known = {**self.stream.clock}
        join(known, self.card.host)
        open_ = [
            stream
            for stream, place in self.uses.items()
            if stream is not self.stream
            and stream not in self.recorded
            and known.get(stream, 0) < place
        ]
        if open_ and not self.is_graphs and not self.card.is_closed:
            self.card.fault(f"memory of {self.stream} is given back while {open_[0]} may use it")


class Stream:
    """A stream. clock: how much work of each stream is done before the next work of this one."""

    numbers = itertools.count()

    def __init__(self, card, device=None):
        self.card, self.clock, self.number = card, {}, next(Stream.numbers)

    def __repr__(self):
        return f"stream {self.number}"

    def launched(self, memories, written):
        """Adds work that uses these memories, and checks that it is ordered after the work that it
        needs."""
        join(self.clock, self.card.host)
        place = self.clock[self] = self.clock.get(self, 0) + 1
        for memory in memories:
            before = list(memory.uses.items()) if memory in written else [memory.write]
            for stream, needed in filter(None, before):
                if self.clock.get(stream, 0) < needed:
                    self.card.fault(f"{self} uses what {stream} may still be computing")
            memory.uses[self] = place
            if memory in written:
                memory.write = self, place
        return place

    def wait_stream(self, other):
        join(self.clock, other.clock)

    def wait_event(self, event):
        join(self.clock, event.clock)

    def record_event(self):
        event = Event(self.card)
        event.record(self)
        return event

    def synchronize(self):
        self.card.wait("Stream.synchronize", self.clock)


class Event:
    def __init__(self, card, **options):
        self.card, self.clock = card, {}

    def record(self, stream=None):
        self.clock = dict((stream or self.card.stream).clock)

    def synchronize(self):
        self.card.wait("Event.synchronize", self.clock)

    def query(self):
        return all(self.card.host.get(stream, 0) >= at for stream, at in self.clock.items())


class Graph:
    """A CUDA graph. replay: runs the same operations and kernels on the same memory with the same
    host values."""

    def __init__(self, card):
        self.card, self.launches, self.num_replays = card, [], 0

    def replay(self):
        self.num_replays += 1
        memories = {memory for _, used, _ in self.launches for memory in used}
        written = {memory for _, _, changed in self.launches for memory in changed}
        self.card.stream.launched(memories, written)
        self.card.launches.append("graph")
        for again, _, _ in self.launches:
            again()

    def pool(self):
        return id(self)


def join(clock, other):
    for stream, place in other.items():
        clock[stream] = max(clock.get(stream, 0), place)
