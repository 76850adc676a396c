"""A run that is killed at any moment is continued, and the files are the same to the last bit."""

from __future__ import annotations

import filecmp
import json
import random
import signal
import subprocess
import sys
import time

import pytest

from mmdeploy_llm.checkpoints.quantize import quantize_checkpoint
from mmdeploy_llm.checkpoints.saving import folders, writer
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.testing.tiny import write_tiny

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
RUN = """
import sys, time
from pathlib import Path
from mmdeploy_llm.checkpoints.quantize import quantize_checkpoint
from mmdeploy_llm.checkpoints.saving import rounders, writer
writer.SHARD_BYTES = 20_000
round_groups = rounders.round_groups
def slowly(*args):
    time.sleep(0.02)
    return round_groups(*args)
rounders.round_groups = slowly
print("ready", flush=True)
quantize_checkpoint(sys.argv[1], Path(sys.argv[2]), bits=4, group_size=32)
"""


def killed(plain, output, seconds):
    """Runs a slow quantization, which is killed after some seconds; returns whether it was."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(plain), str(output)], stdout=subprocess.PIPE
    ) as run:
        run.stdout.readline()
        time.sleep(seconds)
        run.send_signal(signal.SIGKILL)
    return run.returncode == -signal.SIGKILL


@pytest.mark.long
def test_killed(tmp_path, monkeypatch):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    whole, output = tmp_path / "whole", tmp_path / "out"
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    quantize_checkpoint(str(plain), whole, bits=4, group_size=32)
    rng, steps = random.Random(5), []
    for _ in range(3):
        if output.exists() or not killed(plain, output, rng.uniform(0.02, 0.3)):
            break
        mark = output.with_name("out.partial") / folders.MARK
        if mark.exists():
            steps.append(json.loads(mark.read_text()).get("progress", {}).get("num_tensors", 0))
    assert steps == sorted(steps)  # none was begun again
    if not output.exists():
        quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    same(whole, output)


@pytest.mark.full
@pytest.mark.parametrize("num_shards", [3, 4])
def test_continued_after_a_shard(tmp_path, monkeypatch, num_shards):
    """The run dies when a shard is written, before and after it says so."""
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    whole, output = tmp_path / "whole", tmp_path / "out"
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    quantize_checkpoint(str(plain), whole, bits=4, group_size=32)
    record = folders.Partial.record

    def dying(is_recorded):
        def die(self, state):
            is_last = state.get("progress", {}).get("num_shards") == num_shards
            if is_recorded or not is_last:
                record(self, state)
            if is_last:
                raise KeyboardInterrupt

        return die

    for is_recorded in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(folders.Partial, "record", dying(is_recorded))
            with pytest.raises(KeyboardInterrupt):
                quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    rounded = []
    round_groups = writer.packed_tensors
    monkeypatch.setattr(
        writer, "packed_tensors", lambda *args: rounded.append(args[0]) or round_groups(*args)
    )
    done = quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    assert 0 < len(rounded) < done.summary.num_layers
    same(whole, output)


@pytest.mark.full
def test_another_run_is_not_mixed_in(tmp_path, monkeypatch, caplog):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    whole, output = tmp_path / "whole", tmp_path / "out"
    quantize_checkpoint(str(plain), whole, bits=4, group_size=32)
    with monkeypatch.context() as patch:
        patch.setattr(folders.Partial, "finish", lambda self: None)
        quantize_checkpoint(str(plain), output, bits=8, group_size=32)
    quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    assert "of other options or weights left, is removed" in caplog.text
    same(whole, output)


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("left", [(), (f"{folders.MARK}.new",)])
def test_killed_before_the_first_word(tmp_path, left):
    """Nothing is in the folder yet that says which run it is of."""
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    whole, output = tmp_path / "whole", tmp_path / "out"
    quantize_checkpoint(str(plain), whole, bits=4, group_size=32)
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for name in left:
        (partial / name).write_text("{")
    quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    same(whole, output)
    own = tmp_path / "other.partial"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is in the way, and no run that was cut off left it"):
        quantize_checkpoint(str(plain), tmp_path / "other", bits=4, group_size=32)


def same(first, second):
    names = {path.name for path in first.iterdir()}
    assert names == {path.name for path in second.iterdir()}
    _, different, wrong = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (different, wrong) == ([], [])
