"""A folder as people have it: everything in it is read, failed or skipped, each by its name."""

import json
import os
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.records.unicode_text import unescaped
from mmdeploy_llm.values.outputs.request_output import Completions
from mmdeploy_llm.values.prompt import PromptParts

from .messy import FAILED, READ, SKIPPED, write_messy

WANTED = FindingOptions().wanted()


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    return write_messy(tmp_path_factory.mktemp("messy"), has_heif=True)


def test_each_file_is_found_or_skipped_with_its_kind(messy):
    assert len(messy.expected) >= 250
    found = find_media([str(messy.root)], is_recursive=True, wanted=WANTED)
    root = f"{messy.root}/"
    read = {file.path.removeprefix(root): file.kind for file in found.files}
    assert set(read) == messy.names(READ) | messy.names(FAILED)
    assert {skip.path.removeprefix(root) for skip in found.skipped} == messy.names(SKIPPED)
    assert found.skipped.counts == messy.labels
    videos = {name for name, kind in read.items() if kind == "video"}
    assert videos == messy.videos | {"broken/cut.mp4"}


def test_nothing_is_lost_between_the_folder_and_the_lists(messy):
    """A file that neither list has must lie in a folder that is skipped."""
    found = find_media([str(messy.root)], is_recursive=True, wanted=WANTED)
    known = {os.path.normpath(file.path) for file in found.files}
    skipped = {os.path.normpath(skip.path) for skip in found.skipped}
    for parent, folders, names in os.walk(messy.root):
        folders[:] = [name for name in folders if os.path.join(parent, name) not in skipped]
        for name in names:
            path = os.path.join(parent, name)
            assert (path in known) != (path in skipped), path


def test_animations_are_videos_when_asked_for(messy):
    found = find_media([str(messy.root)], is_recursive=True, animated="video", wanted=WANTED)
    moving = [file for file in found.files if "/moving/" in file.path]
    assert Counter(file.kind for file in moving) == {"video": 4, "image": 1}
    found = find_media([str(messy.root)], is_recursive=True, wanted=WANTED)
    assert any("4 images have several frames" in note for note in found.skipped.notes)
    wanted = replace(WANTED, accepted=lambda: ("video",))
    found = find_media([str(messy.root)], is_recursive=True, wanted=wanted)
    assert not found.skipped.notes, "nothing is said of images that the model does not take"


def test_the_sentence_names_the_kinds_and_what_helps(messy):
    text = find_media([str(messy.root)], is_recursive=True, wanted=WANTED).skipped.text
    assert text.startswith(f"skipped {sum(messy.labels.values()) - 7} files and 7 folders: 77 .txt")
    assert "9 .svg, 6 HTML pages named .jpg" in text
    assert "1 pointer of Git LFS named .png (git lfs pull fetches it)" in text
    assert text.endswith("other kinds (--skipped FILE lists all)")


def account_of(messy, out, skipped):
    """Returns what became of each path: from the records and from the list of what was skipped."""
    found = {}
    for line in out.read_text().splitlines():
        record = json.loads(line)
        found[unescaped(record.get("exact", {}).get("id", "")) or record["id"]] = record["outcome"]
    for line in skipped.read_text().splitlines():
        values = json.loads(line)
        path = unescaped(values["exact"]) if "exact" in values else values["skipped"]
        name = path.removeprefix(f"{messy.root}/")
        assert name not in found
        found[name] = SKIPPED
    return found


def test_found_is_captioned_and_empty_and_truncated_and_failed_and_skipped(
    messy, fake_llm, monkeypatch, tmp_path
):
    answer = type(fake_llm).answer
    lacking = {"holiday/1.jpg": "empty", "holiday/2.jpg": "truncated", "scans/3.png": "truncated"}

    def answered(own, prompt, n=1):
        name = next(prompt.items).source.uri.removeprefix(f"{messy.root}/")
        said = "bad" if name in messy.names(FAILED) else "good"
        output = answer(own, PromptParts(text=said), n)
        lack = lacking.get(name)
        if lack is not None:
            text = "" if lack == "empty" else "half of"
            reason = "stop" if lack == "empty" else "length"
            first = replace(output.outputs[0], text=text, finish_reason=reason)
            output = replace(output, outputs=Completions([first]))
        return output

    monkeypatch.setattr(type(fake_llm), "answer", answered)
    out, skipped = tmp_path / "out.jsonl", tmp_path / "skipped.jsonl"
    settings = BatchSettings(finding=FindingOptions(skipped=skipped))
    summary = run_batch(plan_batch(str(messy.root), out, settings), lambda: fake_llm)
    account = account_of(messy, out, skipped)
    wanted = {name: "ok" if found == READ else found for name, found in messy.expected.items()}
    assert account == wanted | lacking
    assert summary.outcomes == Counter(own for own in account.values() if own != SKIPPED)
    assert summary.num_records + len(summary.skipped) == len(messy.expected)


@pytest.mark.full
def test_the_program_accounts_for_each_file(messy, tmp_path):
    """Runs the program with the bundled model over the whole folder."""
    out, skipped = tmp_path / "out.jsonl", tmp_path / "skipped.jsonl"
    given = ["caption", str(messy.root), "-o", str(out), "--skipped", str(skipped)]
    result = CliRunner().invoke(app, [*given, "--max-tokens", "16", "--no-thinking"])
    assert result.exit_code == 1, result.output
    account = account_of(messy, out, skipped)
    failed, skipped = messy.names(FAILED) - messy.sounds, messy.names(SKIPPED) | messy.sounds
    assert {name for name, found in account.items() if found == "failed"} == failed
    assert {name for name, found in account.items() if found == SKIPPED} == skipped
    assert "1 .mp3 (this model takes no audio)" in result.output
    assert set(account) == set(messy.expected)
    counts = Counter(account.values())
    assert f"{counts['ok']} captioned, {counts['failed']} failed" in result.output
    assert "skipped " in result.output
    for line in out.read_text().splitlines():
        record = json.loads(line)
        own = record["path"].rpartition("/")[2]
        assert record["outcome"] != "failed" or own in record["error"]["message"]
