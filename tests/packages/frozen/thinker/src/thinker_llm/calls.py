"""Reads <do>{"name": "f", "arguments": {}}</do>."""

import json

from mmdeploy_llm.hooks import ToolCall, ToolParser

START, END = "<do>", "</do>"


class Calls(ToolParser):
    markers = (START, END)

    def __init__(self):
        self._held = ""

    def feed(self, text):
        self._held += text
        return [part for part in self._parts() if part]

    def finish(self):
        held, self._held = self._held, ""
        return [held] if held else []

    def _parts(self):
        while END in self._held.partition(START)[2]:
            before, _, rest = self._held.partition(START)
            body, _, self._held = rest.partition(END)
            yield before
            yield read_call(body) or f"{START}{body}{END}"
        text = self._held
        begin = text.find(START)
        if begin < 0:
            begin = len(text) - max(n for n in range(len(START)) if text.endswith(START[:n]))
        self._held = text[begin:]
        yield text[:begin]


def read_call(body):
    try:
        name, arguments = (json.loads(body)[key] for key in ("name", "arguments"))
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=json.dumps(arguments))
