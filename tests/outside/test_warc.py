"""A reader of web archives in one file, checked by the kit and captioned by the program."""

import gzip
import importlib
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.testing import CorpusFormatConformance, PluginConformance

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES / "plugins"))
warc = importlib.import_module("warc")
PNG = (EXAMPLES / "images/picture-1.png").read_bytes()


def record(kind, block, **fields):
    lines = {"WARC-Type": kind, "WARC-Date": "2026-11-26T10:00:00Z", **fields}
    lines["Content-Length"] = len(block)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"WARC/1.1\r\n{head}\r\n".encode() + block + b"\r\n\r\n"


def response(url, body=PNG, kind="image/png"):
    block = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode() + body
    return record("response", block, **{"WARC-Target-URI": url})


def row(url, body=PNG, kind="image/png"):
    return {"id": url, "url": url, "date": "2026-11-26T10:00:00Z", "type": kind, "image": body}


def write(path, rows):
    path.write_bytes(b"".join(response(own["id"], own["image"]) for own in rows))


CRAWL = b"".join(
    [
        record("warcinfo", b"software: a crawler\r\n"),
        response("https://a/1.png"),
        response("https://a/", b"<html>", "text/html"),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        response("https://a/2.gif", b"GIF89a", "image/gif"),
    ]
)
FOUND = [row("https://a/1.png"), row("https://a/2.gif", b"GIF89a", "image/gif")]
NO_HTTP = record("response", b"no HTTP", **{"WARC-Target-URI": "https://a/x"})


class TestPlugin(PluginConformance):
    plugin = "warc"


class TestFormat(CorpusFormatConformance):
    spec = warc.provide_corpus_formats()[0]
    samples = {"a crawl": CRAWL, "one": response("https://a/1.png")}  # noqa: RUF012
    rows = {"a crawl": FOUND, "one": FOUND[:1]}  # noqa: RUF012
    damaged = {"no HTTP": (NO_HTTP + CRAWL, [None, *FOUND])}  # noqa: RUF012
    column = "image"
    values = {"an image": PNG, "bytes": bytes(range(256)) * 9}  # noqa: RUF012

    @staticmethod
    def write(path, rows):
        write(path, rows)


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.mark.full
def test_the_program_captions_an_archive(tmp_path):
    """And counts it, estimates it, and does what has failed again when it is resumed."""
    crawl, out = tmp_path / "crawl.warc.gz", tmp_path / "out.jsonl"
    crawl.write_bytes(gzip.compress(NO_HTTP + response("https://a/0.png")) + gzip.compress(CRAWL))
    ask = ("-m", "shapes-vl", "-p", "Describe {url}.", "--plugin", EXAMPLES / "plugins/warc.py")
    code, told = run("count", crawl, *ask)
    assert "(4 items, 2 failed)" in told
    code, told = run("batch", crawl, "-o", out, "--estimate", 2, "--max-tokens", 4, *ask)
    assert (code, out.exists()) == (0, False), told
    for resume in ((), ("--resume",)):
        code, told = run("batch", crawl, "-o", out, "--max-tokens", 4, *ask, *resume)
        found = {one.id: one for one in read_records(out)}
        assert (code, len(found)) == (1, 4), told  # a response is none, and a GIF is cut off
        assert [found[row["id"]].is_ok for row in FOUND] == [True, False]
    print(told)
