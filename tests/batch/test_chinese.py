"""Names and texts in Chinese and mixed scripts, through a whole batch to every output."""

import csv
import json
import unicodedata
from dataclasses import replace

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.report.letters import language
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs

NAMES = (
    "猫.png",
    unicodedata.normalize("NFC", "é 图.png"),
    unicodedata.normalize("NFD", "é 图.png"),
    "ＦＵＬＬ全角（一）.png",
    "😀 表情.png",
    "两个 空格　全角.png",
    "𠮷野家.png",
    "子 文件夹/第１页.png",
)


@pytest.fixture
def photos(tmp_path, png):
    for name in NAMES:
        path = tmp_path / "照片" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    return tmp_path / "照片"


@pytest.mark.one_is_quick
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_every_name_and_text_comes_back_as_it_was(fake_llm, photos, tmp_path, suffix):
    out = tmp_path / f"结果.{suffix}"
    settings = BatchSettings(question="请描述这张图片。")
    summary = run_batch(plan_batch(photos, out, settings), lambda: fake_llm)
    assert (summary.run.num_done, summary.run.num_failed) == (len(NAMES), 0)
    found = {str(record.id): record.text for record in MergedOutputs([str(out)]).records()}
    assert found == {name: f"a caption of {name.rpartition('/')[2]}" for name in NAMES}
    if suffix == "jsonl":
        assert "猫.png" in out.read_text()  # no escapes
        assert {json.loads(line)["id"] for line in out.read_text().splitlines()} == {*NAMES}
    if suffix == "csv":
        rows = list(csv.DictReader(out.read_text(encoding="utf-8-sig").splitlines()))
        assert {row["id"] for row in rows} == {*NAMES}
    job = plan_batch(photos, out, replace(settings, mode="resume"))
    again = run_batch(job, lambda: pytest.fail("the model was opened"))
    assert (again.run.num_items, again.num_left) == (0, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("左边有一个红色的圆 red", "zh"),
        ("赤い円があります", "ja"),
        ("빨간 원 漢字", "ko"),
        ("𠮷", "zh"),
        ("a red circle, ￥5", ""),
        ("", ""),
    ],
)
def test_letters_tell_the_language(text, expected):
    assert language(text) == expected
