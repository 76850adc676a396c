"""`caption --boxes` end to end: a model whose answers have no boxes, and one without a rule."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import cli
from mmdeploy_llm.testing.tiny import write_tiny


@pytest.mark.full
def test_caption_tells_what_it_found(tmp_path):
    """Pictures have their size, videos are told, and a model without a rule is not loaded."""
    names = [f"examples/images/{name}" for name in ("picture-1.png", "clip-1.mp4")]
    words = ["caption", *names, "--boxes", "--no-report", "-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(cli.app, [*words, "-m", "shapes-vl", "-p", "What is there?"])
    assert done.exit_code == 0, done.output
    assert "0 boxes in 0 answers, 1 have none" in done.output
    assert "boxes of 1 answers were not read" in done.output
    assert "found video" in done.output
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    sizes = {record["id"]: record.get("picture_size") for record in records}
    assert sizes["clip-1.mp4"] is None
    assert all(side > 0 for side in sizes["picture-1.png"])
    cluster = CliRunner().invoke(cli.app, [*words, "-m", "shapes-vl", "--ray", "auto"])
    assert "leave out --ray" in f"{cluster.output}{cluster.exception}"
    write_tiny("llama", tmp_path / "words")
    refused = CliRunner().invoke(cli.app, [*words, "-m", str(tmp_path / "words"), "--overwrite"])
    assert refused.exit_code != 0
    assert "writes boxes" in f"{refused.output}{refused.exception}"
