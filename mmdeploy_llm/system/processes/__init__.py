"""Child processes that end with their parent, and the messages between them.

    Worker     one function in a child process, with a channel of values both ways
    Helper     calls into a child that is killed when it does not answer in time; it answers in
               frames, which are never unpickled
    Home       keeps a forked child away from its parent's threads and connections

Nothing here imports torch: a child that needs none starts without it.
"""

from mmdeploy_llm.system.portable.signals import interrupt_thread, interrupted_later

from .forks import Home, finalize_here
from .garbage import without_collections
from .process import Channel, Worker, close_all
from .wire import Message

__all__ = [
    "Channel",
    "Home",
    "Message",
    "Worker",
    "close_all",
    "finalize_here",
    "interrupt_thread",
    "interrupted_later",
    "without_collections",
]
