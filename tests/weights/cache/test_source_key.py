"""The name of a model's file changes with all that its weights depend on, and with nothing else."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from mmdeploy_llm.weights.cache import source_key

FACTS = {"level": "avx2", "rounding": None}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "code" / "inner").mkdir(parents=True)
    (tmp_path / "code" / "inner" / "a.py").write_text("1")
    (tmp_path / "one.py").write_text("1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.safetensors").write_bytes(b"12345678")
    return tmp_path


def key(place, **facts):
    files = place.glob("model/*")
    return source_key(files, [place / "code", place / "one.py"], {**FACTS, **facts})


def same_time(path, change):
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_it_stays(place):
    first = key(place)
    (place / "code" / "notes.txt").write_text("x")
    os.utime(
        place / "model" / "w.safetensors",
        ns=(0, (place / "model" / "w.safetensors").stat().st_mtime_ns),
    )
    assert (
        key(place) != first
    )  # a new time of change is seen, so nothing that was written is missed
    assert key(place) == key(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda place: (place / "model" / "w.safetensors").write_bytes(b"12345679"),
        lambda place: same_time(
            place / "model" / "w.safetensors", lambda path: path.write_bytes(b"8765432x")
        ),
        lambda place: (place / "model" / "config.json").write_text("{}"),
        lambda place: (place / "code" / "inner" / "a.py").write_text("22"),
        lambda place: same_time(place / "code" / "inner" / "a.py", lambda at: at.write_text("2")),
        lambda place: same_time(place / "one.py", lambda path: path.write_text("2")),
        lambda place: (place / "code" / "b.cpp").write_text(""),
        lambda place: (place / "one.py").write_text("22"),
        lambda place: shutil.move(place / "model" / "w.safetensors", place / "model" / "v"),
    ],
)
def test_a_change_of_files_is_seen(place, change):
    first = key(place)
    change(place)
    assert key(place) != first


def test_a_fact_or_a_library_is_seen(place, monkeypatch):
    first = key(place)
    assert key(place, level="avx512") != first
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert key(place) != first
