"""Tables of the program: whole rows where no terminal shows them."""

import pytest
from rich.table import Table
from rich.text import Text

from mmdeploy_llm.cli.terminal.output import hit_table, print_table
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.vectors.search import Found


def found(name: str, prompt: str) -> Found:
    record = Record(id=name, line=0, outcome="ok", prompt=prompt)
    return Found(score=0.123456, record=record)


def test_rows_of_a_search_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """The score and the item were squeezed out by a long text beside them."""
    name, text = "a/very/long/name/of/a/file-" * 9 + ".png", "words of a text\twith tabs\n" * 30
    print_table(hit_table([found(name, text), found("b c", "x [bold] y")]))
    lines = capsys.readouterr().out.splitlines()
    one, two = (line.split("\t") for line in lines[1:])
    assert lines[0].split("\t") == ["rank", "score", "item", "text"]
    assert one == ["1", "0.1235", name, " ".join(text.split())]
    assert two == ["2", "0.1235", "b c", "x [bold] y"]


def test_cells_of_several_lines_stay_in_their_row(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("plugin", "provides")
    table.add_row(Text("one"), Text("model a: A\nmodel b:\tB", style="red"))
    table.add_row("", "wide " * 60)
    print_table(table)
    expected = f"plugin\tprovides\none\tmodel a: A; model b: B\n\t{('wide ' * 60).strip()}\n"
    assert capsys.readouterr().out == expected
