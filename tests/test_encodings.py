"""Wherever a text is read that is not UTF-8, the message names its encoding, as far as it shows."""

import io
import signal
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import cli
from mmdeploy_llm.cli.options.values import text_value
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable.signals import ENDINGS
from mmdeploy_llm.values.text.encodings import is_gbk, not_utf8

CHINESE = "描述这张图片，左边有一个红色的圆。"
GBK = "not UTF-8, it seems to be GB18030; convert it: iconv -f GB18030 -t UTF-8 FILE > NEW"
UTF16 = "not UTF-8, it seems to be UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"


@pytest.mark.parametrize("encoding", ["gbk", "gb18030"])
def test_chinese_in_gbk_is_told(encoding):
    assert not_utf8(f'{{"prompt": "{CHINESE}"}}\n'.encode(encoding)) == GBK
    assert not_utf8(CHINESE.encode("gbk").decode("utf-8", "surrogateescape")) == GBK


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf16_is_told(encoding):
    assert not_utf8(f"id,prompt\na,{CHINESE}\n".encode(encoding)) == UTF16


@pytest.mark.parametrize(
    "data",
    [
        "café, naïve, résumé, Größe\n".encode("latin-1"),
        "Привет, мир! Как дела?".encode("cp1251"),
        "Καλημέρα κόσμε".encode("iso-8859-7"),
        "日本語のテキストです".encode("shift-jis"),
        "紅色的圓形在左邊".encode("big5"),
        b"\xff",
        b"plain",
    ],
)
def test_others_are_not_taken_for_gbk(data):
    assert not is_gbk(data)
    assert not_utf8(data) == "not UTF-8; convert it to UTF-8"


FILES = {  # name of a file -> the words of a command that reads it
    "in.jsonl": ["count", "in.jsonl"],
    "in.csv": ["count", "in.csv"],
    "prompt.txt": ["count", "--prompt", "@prompt.txt"],
    "list.txt": ["caption", "--files-from", "list.txt", "-o", "out.jsonl"],
    "job.toml": ["run", "job.toml"],
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("name", "encoding", "words"),
    [
        *((name, "gbk", GBK) for name in FILES),
        *((name, "utf-16", UTF16) for name in FILES if name != "list.txt"),  # NUL ends its names
    ],
    ids=lambda text: text.partition(",")[0],
)
def test_every_text_that_the_program_reads_is_told(tmp_path, monkeypatch, name, encoding, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(f"提示,{CHINESE}\n".encode(encoding))
    done = CliRunner().invoke(cli.app, FILES[name])
    assert words in done.output
    assert done.exit_code != 0


def test_standard_input_in_gbk_is_told(monkeypatch):
    given = io.TextIOWrapper(io.BytesIO(CHINESE.encode("gbk")), encoding="utf-8")
    program = SimpleNamespace(app=lambda: text_value("--prompt", "-"))
    monkeypatch.setattr(sys, "stdin", given)
    monkeypatch.setattr(cli, "import_module", lambda name: program)
    with pytest.raises(ConfigError) as caught:
        cli.main()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert str(caught.value) == f"--prompt: standard input is {GBK}"


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf" + CHINESE.encode())
    assert text_value("--prompt", f"@{tmp_path / 'prompt.txt'}") == CHINESE


def test_a_terminal_without_a_character_shows_its_number(monkeypatch):
    """A terminal in GBK has no emoji: neither a traceback nor silence."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="gbk")
    monkeypatch.setattr(sys, "stdout", out)
    program = SimpleNamespace(app=lambda: print("图片 😀"))
    monkeypatch.setattr(cli, "import_module", lambda name: program)
    handlers = [signal.getsignal(number) for number in ENDINGS]
    cli.main()
    assert [signal.getsignal(number) for number in ENDINGS] == handlers  # the process goes on
    out.flush()
    assert out.buffer.getvalue().decode("gbk") == "图片 \\U0001f600\n"
