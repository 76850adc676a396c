"""Splits at the end of the thoughts."""

from mmdeploy_llm.hooks import ReasoningParser, Segment

START, END = "<thoughts>", "</thoughts>"


class Thoughts(ReasoningParser):
    markers = (END,)
    start_marker = START
    end_marker = END

    def __init__(self):
        self._is_reasoning = True
        self._held = ""

    def start(self, prompt):
        self._is_reasoning = prompt.rfind(START) >= prompt.rfind(END)

    def feed(self, text):
        if not self._is_reasoning:
            return segments(content=text)
        before, found, after = (self._held + text).partition(END)
        if found:
            self._is_reasoning, self._held = False, ""
            return segments(reasoning=before, content=after)
        num_held = max(n for n in range(len(END)) if before.endswith(END[:n]))
        settled = before[: len(before) - num_held]
        self._held = before[len(settled) :]
        return segments(reasoning=settled)

    def finish(self):
        held, self._held = self._held, ""
        return segments(reasoning=held)


def segments(reasoning="", content=""):
    both = [Segment(kind="reasoning", text=reasoning), Segment(kind="content", text=content)]
    return [segment for segment in both if segment.text]
