"""The function of the process that decodes media: calls functions, and answers what they yield.

call              {"function", "file", "args", "max_memory"}, the media's bytes
each pair         frame with the text {"fields", "shape"} and the array's bytes
end, or an error  frame without a text, for an error with the bytes of [class, message]
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import MediaLimitError, PluginLoadError, RequestError
from mmdeploy_llm.hooks.files import load_named
from mmdeploy_llm.system.portable.limits import set_limit
from mmdeploy_llm.system.processes import Channel, frames
from mmdeploy_llm.system.processes.helper import drop_outputs


def serve(channel: Channel) -> None:
    """Answers calls until the channel closes."""
    channel.receive()
    drop_outputs()
    channel.ready()
    while True:
        call, blob = channel.receive()
        error = _answer(channel, call, bytes(blob))
        channel.answer(*([json.dumps(error).encode()] if error else []))


def _answer(channel: Channel, call: Mapping[str, Any], blob: bytes) -> tuple[str, str] | None:
    """Runs one call; returns the class and message of an error instead of raising it."""
    try:
        set_limit("memory", call["max_memory"])  # where there is none, the deadline protects
        module, _, name = call["function"].partition(":")
        if call["file"] is not None:  # of a plugin that is a single file
            load_named(Path(call["file"]), module)
        function = getattr(importlib.import_module(module), name)
        for fields, array in function(blob, **call["args"]):
            shape = list(array.shape) if array is not None else None
            text = json.dumps({"fields": fields, "shape": shape}).encode()
            frames.send(channel.connection, text, [] if array is None else [array])
    except (BrokenPipeError, ConnectionResetError):  # the parent has gone: nobody can be told
        raise
    except RequestError as error:
        return type(error).__name__, str(error)
    except PluginLoadError as error:
        return "MediaError", str(error)
    except MemoryError:
        limit = call["max_memory"] // 2**20
        message = f"decoding it needs more than the {limit} MiB that a worker may use; shrink it"
        return MediaLimitError.__name__, message
    except (Exception, SystemExit) as error:  # their messages can hold paths and addresses
        return "MediaError", f"it cannot be decoded ({type(error).__name__} while reading it)"
    return None
