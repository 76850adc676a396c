"""Threads decide which requests share an engine's first step, unless a test does."""

PATIENCE = 60  # seconds that requests may take to be prepared


def begin_together(llm, num):
    """The next step of `llm`, an engine of this process, waits until it has `num` requests, no more
    than it begins at the same time. For tests of what only several requests make happen."""
    desk = llm._desk
    assert num <= desk.max_begun

    def first():
        while len(desk._requests) < num:
            desk._inbox.get(timeout=PATIENCE)()
        del desk._step
        desk._step()

    desk._step = first
