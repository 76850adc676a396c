"""A restored model computes the same; whatever is wrong with its file, the model is read from its
own files, and that is told."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.kernels.cpu import load
from mmdeploy_llm.layers import Embedding, Experts, Linear
from mmdeploy_llm.system.portable.files import make_fifo
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.cache import WeightCache, cache_folder, file, folder, folder_size
from mmdeploy_llm.weights.cache.cache import _wait
from mmdeploy_llm.weights.cache.file import MAGIC, keeps_large_pages
from mmdeploy_llm.weights.cache.record import NotKeptError, Record, record

SIZE = 64


class Small(nn.Module):
    """One layer of each kind that packs, a norm and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = Embedding(96, SIZE)
        self.linear = Linear(SIZE, 100, bias=True)
        self.experts = Experts(2, SIZE, 32)
        self.norm = nn.Parameter(torch.empty(SIZE), requires_grad=False)
        self.register_buffer("table", torch.empty(3), persistent=False)

    def forward(self, ids):
        x = self.embed(ids) * self.norm
        weights, experts = torch.full((len(ids), 2), 0.5), torch.tensor([[0, 1]] * len(ids))
        return self.linear(self.experts(x, weights, experts))


@pytest.fixture(scope="module")
def kernels(build_kernels):
    return load()


def packed(kernels, quantization):
    model = Small()
    torch.manual_seed(0)
    for param in model.parameters():
        param.data = torch.randn(param.shape)
    model.table = torch.arange(3.0)
    return pack(model, kernels, quantization)


def pack(model, kernels, quantization):
    for module in (model.embed, model.linear, model.experts):
        module.pack(kernels, quantization)
    return model


def on_meta():
    with torch.device("meta"):
        return Small()


@pytest.fixture
def cache(tmp_path):
    """cache(**changes) -> a WeightCache of the same file."""

    def make(key="a", **changes):
        options = {"max_bytes": 2**30, "min_bytes": 0, **changes}
        return WeightCache(tmp_path / "weights", key, **options)

    return make


@pytest.fixture
def kept(cache, kernels):
    """The path of a file that is whole."""
    own = cache()
    own.keep(packed(kernels, "int8"))
    own.wait()
    return own._path


def restored(cache, kernels, memory=None):
    model = on_meta()
    own = cache()
    return model if own.restore(model, kernels, memory or kernels.memory) else None


@pytest.mark.one_is_quick
@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_restored_model_computes_the_same(cache, kernels, quantization, is_mapped, monkeypatch):
    monkeypatch.setattr(file, "keeps_large_pages", lambda: is_mapped)
    model, ids = packed(kernels, quantization), torch.tensor([0, 5, 95])
    first = cache()
    first.keep(model)
    first.wait()
    own, found = cache(), on_meta()
    assert own.exists
    assert own.restore(found, kernels, kernels.memory)
    assert (own.mapped_bytes > 0) is is_mapped
    found.table = torch.arange(3.0)
    assert own.is_complete(found)
    assert torch.equal(pack(found, kernels, quantization)(ids), model(ids))
    own.keep(found)  # which is there
    assert own._writer is None


def test_weights_that_the_memory_does_not_hold_stay_in_their_file(
    cache, kernels, kept, monkeypatch, caplog
):
    size = kept.stat().st_size
    monkeypatch.setattr(file, "keeps_large_pages", lambda: False)
    for free, is_mapped in ((size, False), (size - 1, True)):
        monkeypatch.setattr(file, "free_ram", lambda free=free: free)
        monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.free_ram", lambda free=free: free)
        own, model = cache(), on_meta()
        assert own.restore(model, kernels, kernels.memory)
        assert own.mapped_bytes == (size if is_mapped else 0)
        assert ("is read from" in caplog.text) is is_mapped
        assert model.experts.is_in_file is is_mapped


def test_room_for_weights_that_the_memory_does_not_hold(cache, tmp_path, monkeypatch, caplog):
    """Files are used where both memory and the cache's bounds say so; without room that is told."""
    places = []
    memory = SimpleNamespace(
        has_files=True, in_files=lambda place: nullcontext(places.append(place))
    )
    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.free_ram", lambda: 1000)
    with cache().room_for(1000, memory):
        assert not places
    assert not caplog.text
    with cache(max_bytes=1000).room_for(1001, memory):
        assert not places
    assert "1001 bytes are more than the cache may have, 1000" in caplog.text
    disk = SimpleNamespace(total=20_000, free=2000)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda place: disk)
    with cache().room_for(1001, memory):
        assert not places
    words = "the disk has 2000 bytes left, of which 1000 stay free, and 1001 are needed"
    assert words in caplog.text
    disk.free += 1
    own = cache()
    with own.room_for(1001, memory):
        assert places == [tmp_path / "weights"]
    assert "they are written to" in caplog.text
    assert own.mapped_bytes == 1001
    disk.free = 10**6
    for more in ("num_ranks", "num_engines"):
        with cache(**{more: 2}).room_for(500, memory):
            assert len(places) == 1
        with cache(**{more: 2}).room_for(501, memory):
            assert places.pop() == tmp_path / "weights"
    memory.has_files = False
    with cache().room_for(1001, memory):
        assert len(places) == 1


def test_a_file_that_cannot_be_written_leaves_the_model(cache, kernels, monkeypatch, caplog):
    """Nothing was given back yet: it stays where it is."""
    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.free_ram", lambda: 0)
    own = cache()
    with own.room_for(1000, kernels.memory):
        model = packed(kernels, "int8")

    def write(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.write", write)
    own.keep(model)
    assert own.moved(model, lambda: None, lambda: None) is model
    assert own.mapped_bytes == 1000
    assert "No space left on device" in caplog.text


def test_memory_that_several_tensors_share_is_not_given_back(tmp_path):
    whole = torch.arange(4 * 4096.0)
    tensors = [
        torch.zeros(5000),
        whole[4096:8192],
        whole[:4096],
        whole[8000:9000],
        whole.view(4, 4096)[:, 4000:4001],
        torch.zeros(0),
        whole[12289:],
    ]
    given = []
    kept = Record(tensors=tensors, values={})
    with open(tmp_path / "file", "xb") as place:
        file.write(place, "name", kept, lambda: False, given.append)
    numbers = [number for number, own in enumerate(tensors) if any(own is one for one in given)]
    assert numbers == [0, 5]
    given.clear()
    apart = Record(tensors=[whole[4096:8192], whole[8192:], whole[:4096]], values={})
    with open(tmp_path / "other", "xb") as place:
        file.write(place, "name", apart, lambda: False, given.append)
    assert len(given) == 3


def test_a_step_has_the_pages_read_of_its_experts_alone(cache, kernels, kept, monkeypatch):
    """The pages of an expert lie together; asking for them changes no answer. The portable level
    loops over experts."""
    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.free_ram", lambda: 0)
    monkeypatch.setattr(file, "free_ram", lambda: 0)
    model, ids = restored(cache, kernels), torch.tensor([0, 5, 95])
    experts = model.experts
    experts.kernels, model.table = kernels, torch.arange(3.0)
    found = model(ids)
    mixture = experts._mixtures[torch.float32]
    assert (mixture is None) is kernels.leaves_many_rows_to_torch
    if mixture is not None:
        (first, size), (second, _) = mixture._pages.tolist()
        assert first % mmap.PAGESIZE == second % mmap.PAGESIZE == 0
        assert first < first + size <= second < first + size + mmap.PAGESIZE
    experts.kernels = TORCH
    assert torch.equal(found, model(ids))


def test_a_buffer_that_depends_on_packed_weights_is_seen(cache, kernels, kept):
    own, model = cache(), on_meta()
    assert own.restore(model, kernels, kernels.memory)
    model.table = torch.zeros(3)
    assert not own.is_complete(model)
    kept.unlink()
    own.keep(packed(kernels, "int8"))
    assert not kept.exists()


def damaged(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(MAGIC)],
        lambda data: data[:-1],
        lambda data: data[:-4096],
        lambda data: data + b"\0",
        lambda data: bytes(len(data)),
        lambda data: damaged(data, 3),
        lambda data: damaged(data, len(MAGIC)),
        lambda data: damaged(data, len(MAGIC) + 20),
        lambda data: damaged(data, len(data) // 2),
        lambda data: damaged(data, len(data) - 30),
        lambda data: data[:8192] + data[12288:16384] + data[8192:12288] + data[16384:],
        lambda data: data[: len(MAGIC)] + b"\xff" * 8 + data[len(MAGIC) + 8 :],
    ],
)
def test_a_damaged_file_is_told_and_written_again(cache, kernels, kept, damage, caplog):
    kept.write_bytes(damage(kept.read_bytes()))
    assert restored(cache, kernels) is None
    assert "cannot be used and is written again" in caplog.text
    assert not kept.exists()
    own = cache()
    own.keep(packed(kernels, "int8"))
    own.wait()
    assert restored(cache, kernels) is not None


def test_a_file_under_another_name_is_not_used(cache, kernels, kept):
    kept.rename(kept.with_stem("b"))
    assert not cache("b").restore(on_meta(), kernels, kernels.memory)


def test_a_file_of_another_model_leaves_the_model_alone(cache, kernels, kept, caplog):
    with torch.device("meta"):
        other = Linear(SIZE, 10)
    assert not cache().restore(other, kernels, kernels.memory)
    assert "another model" in caplog.text
    assert other.weight.is_meta


@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_others_may_write_is_not_used(cache, kernels, kept, which, caplog):
    place = kept if which == "file" else kept.parent
    place.chmod(place.stat().st_mode | 0o020)
    own = cache()
    assert not own.restore(on_meta(), kernels, kernels.memory)
    assert "whose weights would be used; run: chmod go-w" in caplog.text
    before = kept.stat()
    own.keep(packed(kernels, "int8"))
    assert kept.stat() == before
    assert len(caplog.records) == 1


def test_what_belongs_to_others_is_not_used(cache, kernels, kept, monkeypatch, caplog):
    monkeypatch.setattr("mmdeploy_llm.system.portable.files.own_user", lambda: 12345)
    monkeypatch.setattr(os, "fstat", lambda fd, own=os.fstat: _owned(own(fd), 54321))
    kept.parent.chmod(0o755)
    if kept.stat().st_uid == 0:
        assert not cache().restore(on_meta(), kernels, kernels.memory)
        assert "belongs to user 54321" in caplog.text


def _owned(status, user):
    values = list(status)
    values[4] = user
    return os.stat_result(values)


def test_links_are_not_followed(cache, kernels, kept, caplog):
    kept.rename(kept.with_suffix(".real"))
    kept.symlink_to(kept.with_suffix(".real"))
    assert not cache().restore(on_meta(), kernels, kernels.memory)
    assert f"remove it: {str(kept)!r}" in caplog.text


@pytest.mark.parametrize("name", ["weights", "weights/below", "nul\0"])
def test_a_folder_that_cannot_be_made_is_told(tmp_path, kernels, caplog, name):
    (tmp_path / "weights").write_text("a file")
    own = WeightCache(tmp_path / name, "a", max_bytes=2**30, min_bytes=0)
    assert not own.exists
    own.keep(packed(kernels, None))
    assert "not kept for the next start" in caplog.text
    assert ("Not a folder; remove it, or name another" in caplog.text) == (name == "weights")


def test_a_damaged_file_that_cannot_be_removed_is_told(cache, kernels, kept, monkeypatch, caplog):
    """Such a file stays in a folder that may only be read: each start reads the model's files."""
    kept.write_bytes(b"x")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert restored(cache, kernels) is None
    assert "cannot be used and cannot be removed: it ends early" in caplog.text


def test_a_disk_that_becomes_full_is_told(cache, kernels, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.write", full)
    own = cache()
    own.keep(packed(kernels, None))
    own.wait()
    assert f"in {own._path.parent}: [Errno 28] No space left" in caplog.text
    assert folder_size(own._path.parent).num_files == 0


def test_a_small_file_fits_on_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    disk = SimpleNamespace(total=10**12, free=100_000)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: disk)
    folder.make_folder(tmp_path, 1000, 2**30)
    with pytest.raises(folder.NoRoomError, match=f"of which {8 * 2**30} stay free, and 1001 are"):
        folder.make_folder(tmp_path, 1001, 2**30)


@pytest.mark.parametrize("case", ["disk", "bound"])
def test_a_file_that_does_not_fit_is_not_begun(cache, kernels, monkeypatch, caplog, case):
    caplog.set_level(logging.INFO)
    if case == "disk":
        usage = folder.shutil.disk_usage("/")._replace(total=100_000, free=20_000)
        monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: usage)
    own = cache(max_bytes=2**30 if case == "disk" else 5000)
    own.keep(packed(kernels, None))
    assert own._writer is None
    assert ("the disk has" if case == "disk" else "more than the cache may have") in caplog.text


def test_a_small_model_is_not_kept(cache, kernels):
    own = cache(min_bytes=2**30)
    own.keep(packed(kernels, None))
    assert own._writer is None


def keep(cache, kernels):
    own = cache()
    own.keep(packed(kernels, None))
    own.wait()
    return own


def test_one_of_two_writers_writes(cache, kernels):
    path = cache()._path
    folder.make_folder(path.parent, 1, 2**30)
    with suppress(OSError), folder.new_file(path) as other:
        assert other is not None
        assert not keep(cache, kernels).exists
        raise OSError  # the other writes nothing
    keep(cache, kernels)
    assert restored(cache, kernels) is not None


def test_a_process_that_was_first_is_no_failure(cache, kernels, monkeypatch, caplog):
    """Another process looks for unfinished files, or ends its own, at the worst moment: after this
    one has looked, and before it has locked its own."""
    path, make = cache()._path, folder.tempfile.mkstemp
    worst = [lambda new: folder._is_written(Path(new)), lambda new: keep(cache, kernels)]

    def made(*args):
        fd, name = make(*args)
        if worst:
            worst.pop(0)(name)
        return fd, name

    monkeypatch.setattr(folder.tempfile, "mkstemp", made)
    keep(cache, kernels)
    assert not worst
    assert restored(cache, kernels) is not None
    assert list(path.parent.iterdir()) == [path]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_writer_that_fails_leaves_the_file_of_another_alone(cache, kernels, monkeypatch, caplog):
    path = cache()._path
    folder.make_folder(path.parent, 1, 2**30)
    with folder.new_file(path) as other:
        with monkeypatch.context() as patch:
            patch.setattr(folder.files, "lock", no_locks)
            keep(cache, kernels)
        assert "No locks available" in caplog.text
        other.write(b"x")
    assert path.read_bytes() == b"x"
    assert list(path.parent.iterdir()) == [path]


def no_locks(file):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_removed_while_it_is_written_is_told(cache, kernels, monkeypatch, caplog, what):
    def removed(written, *_):
        Path(written.name).unlink()
        if what == "folder":
            Path(written.name).parent.rmdir()

    with monkeypatch.context() as patch:
        patch.setattr("mmdeploy_llm.weights.cache.cache.write", removed)
        assert not keep(cache, kernels).exists
    assert "was removed while it was written" in caplog.text
    keep(cache, kernels)
    assert restored(cache, kernels) is not None


def three_of_different_times(cache, kernels):
    """Keeps three models, the first of which was not used for longest. Returns their files."""
    paths = []
    for number, key in enumerate("abc"):
        own = cache(key)
        own.keep(packed(kernels, None))
        own.wait()
        paths.append(own._path)
        os.utime(own._path, (number, number))
    return paths


def test_two_processes_that_make_room_remove_no_more_than_one_does(cache, kernels, monkeypatch):
    paths = three_of_different_times(cache, kernels)
    files = folder._files

    def both_look(place):
        found = files(place)
        paths[0].unlink()  # the other is faster
        return found

    monkeypatch.setattr(folder, "_files", both_look)
    folder.make_room(paths[2], 2 * paths[2].stat().st_size)
    assert [path.exists() for path in paths] == [False, True, True]


def test_room_is_made_for_a_file_that_stays(cache, kernels):
    paths = three_of_different_times(cache, kernels)
    folder.make_room(paths[0], paths[0].stat().st_size)
    assert [path.exists() for path in paths] == [True, False, False]


def test_a_stopped_writer_leaves_nothing(cache, kernels):
    own = cache()
    own._stop.set()
    own.keep(packed(kernels, None))
    own.wait()
    assert folder_size(own._path.parent).num_files == 0


def test_files_that_were_not_used_for_longest_leave(cache, kernels):
    paths = three_of_different_times(cache, kernels)
    size = paths[0].stat().st_size
    assert cache("a").restore(on_meta(), kernels, kernels.memory)  # used now
    left = paths[0].with_name("killed.new")
    left.write_text("")
    with folder.new_file(paths[0].with_name("begun.weights")) as begun:
        last = cache("d", max_bytes=3 * size)
        last.keep(packed(kernels, None))
        last.wait()
        assert [path.exists() for path in (*paths, last._path)] == [True, False, True, True]
        assert folder_size(paths[0].parent).num_bytes == 3 * size
        assert [path.exists() for path in (left, Path(begun.name))] == [False, True]


class OwnLinear(Linear):
    def pack(self, kernels, quantization):
        super().pack(kernels, quantization)


@pytest.mark.parametrize("case", ["layer", "weight", "model", "device"])
def test_what_plugins_pack_themselves_is_not_kept(kernels, case):
    model = packed(kernels, None)
    if case == "layer":
        model.linear = OwnLinear(SIZE, 10)
    if case == "weight":
        model.linear.packed = object()
    if case == "model":
        model.is_cacheable = False
    if case == "device":
        model.norm = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    with pytest.raises(NotKeptError):
        record(model)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_not_used(cache, kernels, kept, kind, caplog):
    kept.unlink()
    if kind == "folder":
        kept.mkdir()
    else:
        make_fifo(kept)
    assert not cache().restore(on_meta(), kernels, kernels.memory)
    assert str(kept) in caplog.text


def test_the_folder_of_an_option():
    assert EngineConfig(model="x", weight_cache="off").weight_cache is False
    assert EngineConfig(model="x", weight_cache=Path("/y")).weight_cache == "/y"
    assert cache_folder(False) is None
    assert cache_folder("~/x") == Path.home() / "x"
    assert cache_folder(True).name == "weights"
    assert isinstance(keeps_large_pages(), bool)
    assert folder_size(Path("/nowhere")).num_files == 0
    with pytest.raises(ConfigError, match="path of the folder is empty"):
        EngineConfig(model="x", weight_cache="")


def test_the_end_of_the_program_waits_and_then_stops_it(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.MAX_WAIT", 0.05)
    stop = threading.Event()
    writer = threading.Thread(target=stop.wait, args=(10,))
    writer.start()
    _wait(writer, stop)
    assert stop.is_set()
    writer.join(60)
    assert not writer.is_alive()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()])
def test_a_file_that_the_system_does_not_map_is_told_and_stays(
    cache, kernels, kept, monkeypatch, caplog, error
):
    def refused(*_):
        raise error

    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.read", refused)
    assert not cache().restore(on_meta(), kernels, kernels.memory)
    assert f"{kept} cannot be read: " in caplog.text
    assert kept.exists()


def test_a_file_that_is_read_in_vain_counts_as_no_memory(cache, kernels, kept, monkeypatch):
    def rebuilt(factory, checkpoint, device, split, restore):
        model = on_meta()
        assert restore(model)
        model.table = torch.zeros(3)  # another than when the model was kept
        return model

    monkeypatch.setattr("mmdeploy_llm.weights.cache.cache.restored_model", rebuilt)
    monkeypatch.setattr(file, "keeps_large_pages", lambda: True)
    own = cache()
    assert own.restored(Small, None, None, kernels, lambda model: None) is None
    assert own.mapped_bytes == 0


class Summing(Small):
    """Computes a buffer from a weight; without its values it raises, or gives something else."""

    raises = False

    def init_buffers(self, device):
        if self.raises:
            raise RuntimeError("the weights are packed")
        self.table = torch.zeros(3)


@pytest.mark.parametrize("raises", [False, True])
def test_a_model_that_its_file_cannot_restore_is_read_and_written_once(
    cache, kernels, raises, monkeypatch
):
    monkeypatch.setattr(Summing, "raises", raises)
    model = packed(kernels, None)  # its buffer is not zeros

    def start(key="a"):
        own = cache(key)
        found = own.restored(
            lambda config: Summing(), SimpleNamespace(config=None), None, kernels, lambda _: None
        )
        if found is None:
            own.keep(model)
            own.wait()
        return own, found

    first, _ = start()
    assert first.exists
    second, found = start()
    assert found is None
    assert not second.exists
    assert second.mapped_bytes == 0
    third, _ = start()
    assert not third.exists
    assert folder_size(third._path.parent).num_bytes == 0
    other, _ = start("b")
    assert other.exists
