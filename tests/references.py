"""Tiny checkpoints, and what transformers answers about a checkpoint, made once for all processes
and runs of the tests.

    .pytest_cache/d/references/
      <versions and code that write>/
        <family, options>/              a checkpoint: tests read it, and copy it to change it
        <family, options>.json          the size and time of each of its files
        <files of a checkpoint>/        answers about any checkpoint, each in a file of its name
          <question>.safetensors
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import mmdeploy_llm_plugins
import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file

from mmdeploy_llm.testing import models as model_checks
from mmdeploy_llm.testing import tiny
from mmdeploy_llm.testing.models.models import transformers_reference
from mmdeploy_llm.testing.tiny import write_tiny

LIBRARIES = (np, safetensors, tokenizers, torch, transformers)
DAY = 24 * 60 * 60


def digest(*values):
    """Names values, whatever they are made of, by their contents."""
    found = hashlib.sha256()
    _feed(found, values)
    return found.hexdigest()[:24]


def _feed(found, value):
    found.update(type(value).__name__.encode())
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        found.update(str(len(value)).encode())
        for part in value:
            _feed(found, part)
    elif isinstance(value, torch.Tensor):
        _feed(found, [str(value.dtype), [*value.shape], value.numpy().tobytes()])
    elif isinstance(value, bytes | str):
        data = value.encode() if isinstance(value, str) else value
        found.update(f"{len(data)} ".encode() + data)
    else:
        assert isinstance(value, int | float | torch.dtype | None), type(value)
        found.update(f"{value} ".encode())


def code_that_writes():
    """Returns the source of all that writes checkpoints and asks transformers."""
    rooms = [Path(room.__path__[0]) for room in (model_checks, tiny)]
    plugins = Path(mmdeploy_llm_plugins.__path__[0])
    paths = [Path(__file__), *plugins.rglob("tiny*.py")]
    paths += [path for room in rooms for path in room.rglob("*.py")]
    return {path.relative_to(path.parents[2]).as_posix(): path.read_bytes() for path in paths}


class References:
    """The folder above. `tiny` and `of` are all that tests need."""

    def __init__(self, cache):
        versions = [library.__version__ for library in LIBRARIES]
        self._root = cache / digest(versions, code_that_writes())
        self._given = {}  # checkpoint -> its files when it was handed out
        self._loaded = {}  # folder of answers -> Reference
        self._root.mkdir(exist_ok=True)
        for other in cache.iterdir():  # of other code or versions
            if other != self._root and time.time() - other.stat().st_mtime > DAY:
                shutil.rmtree(other, ignore_errors=True)

    def tiny(self, family, **options):
        """Returns the folder of a family's tiny checkpoint; options: of write_tiny."""
        folder = self._root / f"{family}-{digest(options)}"
        if folder not in self._given:
            with FileLock(f"{folder}.lock"):
                if not self._is_whole(folder):
                    self._write(folder, family, options)
            self._given[folder] = files(folder)
        return folder

    def of(self, folder):
        """Returns the Reference of a checkpoint, which this package may have written or not."""
        contents = {
            path.name: path.read_bytes()
            for path in sorted(Path(folder).iterdir())
            if path.suffix in (".json", ".safetensors")
        }
        answers = self._root / digest(contents)
        answers.mkdir(exist_ok=True)
        found = self._loaded.setdefault(answers, Reference(answers))
        found.folder = Path(folder)  # an earlier one with the same files may be gone
        return found

    def changed(self):
        """Returns the checkpoints that a test wrote to. They are removed."""
        found = [folder for folder, before in self._given.items() if files(folder) != before]
        for folder in found:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _is_whole(self, folder):
        state = folder.with_suffix(".json")
        return folder.exists() and state.exists() and json.loads(state.read_text()) == files(folder)

    def _write(self, folder, family, options):
        shutil.rmtree(folder, ignore_errors=True)
        new = folder.with_suffix(f".{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        write_tiny(family, new, **options)
        new.rename(folder)
        folder.with_suffix(".json").write_text(json.dumps(files(folder)))


def files(folder):
    """Returns the size and the time of each file."""
    found = {path.name: path.stat() for path in sorted(folder.glob("*"))}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in found.items()}


class Answers:
    """Tensors by the question that they answer; a folder."""

    def __init__(self, folder):
        self._folder = folder

    def __call__(self, compute, *question):
        """Returns the answer to a question: a tensor, which `compute` makes the first time."""
        path = self._folder / f"{digest(*question)}.safetensors"
        if not path.exists():
            with FileLock(self._folder / "lock"):
                if not path.exists():
                    new = path.with_suffix(f".{os.getpid()}")
                    save_file({"answer": compute().contiguous()}, new)
                    new.replace(path)
        return load_file(path)["answer"]


class Reference:
    """transformers' model of a folder, as testing.models.reference runs it. It is loaded when it is
    asked for what it has not answered yet."""

    def __init__(self, answers):
        self.folder, self.answers = None, Answers(answers)

    @cached_property
    def loaded(self):
        return transformers_reference(self.folder)

    @property
    def model(self):
        return self.loaded.model

    @property
    def config(self):
        return self.loaded.config

    def reads(self, parameter, prompts):
        return self.loaded.reads(parameter, prompts)

    def positions(self, prompt, media):
        return self.loaded.positions(prompt, media)

    def logits(self, prompt, media=()):
        return self.answers(
            lambda: self.loaded.logits(prompt, media), "logits", list(prompt), list(media)
        )

    def generate(self, prompt, num_tokens, media=()):
        question = "generate", list(prompt), num_tokens, list(media)
        return self.answers(
            lambda: torch.tensor(self.loaded.generate(prompt, num_tokens, media)), *question
        ).tolist()
