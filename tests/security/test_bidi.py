"""Bidirectional controls reorder text beside them: the terminal and the report have none."""

import io
import logging
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from mmdeploy_llm.batch.report.letters import without_bidi_controls
from mmdeploy_llm.batch.report.page import EMBEDDED_CARDS, ReportHead, write_report
from mmdeploy_llm.batch.run import RunCounts
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.cli import PrintableFormatter
from mmdeploy_llm.cli.terminal.letters import printable
from mmdeploy_llm.cli.terminal.output import batch_summary, caption_table, print_answer
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
    ToolCall,
)

CONTROLS = "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
HARMLESS = "שלום world سلام \u200e\u200f e\u0301 👩\u200d🔬"
EVIL = f"photo_{CONTROLS}gpj.exe"


def is_clean(text):
    """Whether the text has no control, neither as it is nor escaped for JavaScript."""
    is_escaped = re.search(r"\\u(202[a-e]|206[6-9])|&#(823[4-8]|829[4-7]);", text)
    return not is_escaped and not set(text) & set(CONTROLS)


def record(number):
    failed = {"error": ItemError(code=400, kind=EVIL, message=EVIL)}
    return Record(
        id=f"{number}{EVIL}",
        path=None if number % 2 else f"/{number}{EVIL}",
        line=number,
        text=EVIL + HARMLESS,
        reasoning=EVIL,
        prompt=EVIL,
        media=(Media(kind="image", name=f"/{EVIL}"),),
        tool_calls=({"function": {"name": EVIL, "arguments": EVIL}},),
        outputs=({"text": EVIL}, {"text": EVIL}),
        **(failed if number % 3 == 0 else {}),
    )


@pytest.mark.parametrize("char", CONTROLS)
def test_each_control_is_replaced(char):
    for clean in (without_bidi_controls, printable):
        assert clean(f"a{char}b") == "a\ufffdb"


def test_text_that_runs_from_right_to_left_stays():
    for clean in (without_bidi_controls, printable):
        assert clean(HARMLESS) == HARMLESS


@pytest.mark.one_is_quick
@pytest.mark.parametrize("num", [6, EMBEDDED_CARDS + 30])
def test_nothing_in_a_report(tmp_path, num):
    """Every field of every card, the page's head, and the scripts with further cards."""
    index, records = RecordIndex(), [record(number) for number in range(1, num + 1)]
    for number, item in enumerate(records):
        index.add(item, number, 0)
    head = ReportHead(
        model=EVIL,
        prompt=EVIL,
        created="today",
        version="1",
        speeds={EVIL: EVIL},
        settings={EVIL: EVIL},
    )
    target = tmp_path / "page.html"
    write_report(target, records, head, index, lambda media: (b"x",), num_shown=num)
    texts = [target.read_text(), *(path.read_text() for path in tmp_path.rglob("cards-*.js"))]
    assert len(texts) == 1 + (num > EMBEDDED_CARDS)
    assert all(map(is_clean, texts))
    assert HARMLESS in texts[0]
    assert texts[0].count("photo_\ufffd") > 20


def shown(draw):
    console = Console(file=io.StringIO(), width=200)
    draw(console)
    return console.file.getvalue()


def test_nothing_on_the_terminal():
    completion = CompletionOutput(
        text=EVIL,
        reasoning_content=EVIL,
        tool_calls=(ToolCall(name=EVIL, arguments=EVIL, id="c"),),
    )
    output = RequestOutput(
        request_id="r",
        prompt="",
        outputs=Completions([completion]),
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0),
    )
    aside = Console(file=io.StringIO())
    texts = [
        shown(lambda console: console.print(caption_table([record(2), record(6)]))),
        shown(lambda console: print_answer([output], console, aside)),
        aside.file.getvalue(),
        batch_summary(
            BatchSummary(
                sink=SimpleNamespace(notes=lambda: (EVIL,)),
                ending="done",
                run=RunCounts(num_done=1),
                num_before=0,
                failures={EVIL: 1},
                outcomes={},
                lacks={EVIL: 1},
                num_left=0,
                index=RecordIndex(),
            ),
            done="done",
        ),
        PrintableFormatter().format(
            logging.LogRecord("x", logging.WARNING, "", 0, "%s", (EVIL + "\x1b[2J",), None)
        ),
    ]
    assert all(map(is_clean, texts))
    assert all("photo_" in text for text in texts)
    assert "\x1b" not in texts[-1]
