"""A folder as people have it: everything in it is read, failed or skipped, each by its name."""

import os
from collections import Counter

import pytest

from mmdeploy_llm.finding.files import find_media

from .messy import FAILED, READ, SKIPPED, write_messy


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    return write_messy(tmp_path_factory.mktemp("messy"), has_heif=True)


def test_each_file_is_found_or_skipped_with_its_kind(messy):
    assert len(messy.expected) >= 250
    found = find_media([str(messy.root)], is_recursive=True)
    root = f"{messy.root}/"
    read = {file.path.removeprefix(root): file.kind for file in found.files}
    assert set(read) == messy.names(READ) | messy.names(FAILED)
    assert {skip.path.removeprefix(root) for skip in found.skipped} == messy.names(SKIPPED)
    assert found.skipped.counts == messy.labels
    videos = {name for name, kind in read.items() if kind == "video"}
    assert videos == messy.videos | {"broken/cut.mp4"}


def test_nothing_is_lost_between_the_folder_and_the_lists(messy):
    """What the folder shows, and neither list has, lies in a folder that is skipped."""
    found = find_media([str(messy.root)], is_recursive=True)
    known = {os.path.normpath(file.path) for file in found.files}
    skipped = {os.path.normpath(skip.path) for skip in found.skipped}
    for parent, folders, names in os.walk(messy.root):
        folders[:] = [name for name in folders if os.path.join(parent, name) not in skipped]
        for name in names:
            path = os.path.join(parent, name)
            assert (path in known) != (path in skipped), path


def test_animations_are_videos_when_asked_for(messy):
    found = find_media([str(messy.root)], is_recursive=True, animated="video")
    moving = [file for file in found.files if "/moving/" in file.path]
    assert Counter(file.kind for file in moving) == {"video": 4, "image": 1}
    found = find_media([str(messy.root)], is_recursive=True)
    assert any("4 images have several frames" in note for note in found.skipped.notes)


def test_the_sentence_names_the_kinds_and_what_helps(messy):
    text = find_media([str(messy.root)], is_recursive=True).skipped.text
    assert text.startswith(f"skipped {sum(messy.labels.values()) - 7} files and 7 folders: 62 .txt")
    assert "9 .svg, 6 HTML page named .jpg" in text
    assert "1 pointer of Git LFS named .png (git lfs pull fetches it)" in text
    assert text.endswith("other kinds")
