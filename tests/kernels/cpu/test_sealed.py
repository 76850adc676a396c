"""Libraries in the user's cache that are damaged, of another program, or of another user."""

import os
import subprocess
import sys
import threading

import pytest

from mmdeploy_llm.kernels.cpu import BuildError, Level, build, cpu_kernels, load, prebuilt
from mmdeploy_llm.kernels.cpu import build as build_function
from mmdeploy_llm.kernels.cpu.build import source_digest
from mmdeploy_llm.kernels.cpu.sealed import ForeignError, check_owner, is_intact, write_sealed

LIBRARY = os.urandom(20_000)
DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte more": lambda data: data + b"x",
    "zeros at the end": lambda data: data[:4096] + bytes(len(data) - 4096),
    "one bit": lambda data: data[:9999] + bytes([data[9999] ^ 1]) + data[10000:],
    "another program": lambda data: b"\x7fELF" + bytes(9000),
    "text": lambda data: b"hello",
}


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "new").mkdir()
    write_sealed(LIBRARY, tmp_path / "kernels.so", tmp_path / "new")
    return tmp_path / "kernels.so"


def test_a_library_is_as_it_was_written(sealed):
    assert is_intact(sealed)
    assert sealed.read_bytes().startswith(LIBRARY)
    check_owner(sealed)
    assert not is_intact(sealed.with_name("none.so"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_before_the_library_is_loaded(sealed, damage):
    sealed.write_bytes(DAMAGES[damage](sealed.read_bytes()))
    assert not is_intact(sealed)


def test_a_library_of_other_sources_under_this_name(sealed):
    assert not is_intact(sealed.rename(sealed.with_name("kernels-of-others.so")))


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_what_others_may_write_is_refused(sealed, mode):
    sealed.chmod(mode)
    with pytest.raises(ForeignError, match="may be written by other users, whose code would run"):
        check_owner(sealed)
    sealed.parent.chmod(mode)
    with pytest.raises(ForeignError, match="run: chmod go-w"):
        check_owner(sealed.parent)


def test_what_others_own_is_refused(sealed, monkeypatch):
    owner = sealed.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # what root owns is trusted by everybody
        check_owner(sealed)
        os.chown(sealed, 4321, -1)
        owner = 4321
    with pytest.raises(ForeignError, match=f"belongs to user {owner}, whose code would run"):
        check_owner(sealed)


def test_a_damaged_library_of_a_wheel_is_not_used(tmp_path, caplog):
    path = tmp_path / f"portable-{source_digest(Level.PORTABLE)}.so"
    path.write_bytes(b"hello")
    assert prebuilt.find_prebuilt(Level.PORTABLE, tmp_path) is None
    assert "of the wheel is damaged and is not used; install the wheel again" in caplog.text


@pytest.fixture
def quick_compiler(monkeypatch):
    """Compiling takes no time; returns the list of the libraries that were compiled."""
    from mmdeploy_llm.kernels.cpu import build as _  # noqa: F401 - the function hides the module

    module, made = sys.modules["mmdeploy_llm.kernels.cpu.build"], []

    def compile_now(command, folder):
        path = folder / "kernels.so"
        path.write_bytes(LIBRARY)
        made.append(path)
        return path

    monkeypatch.setattr(module, "_command", lambda level, flags=(): [sys.executable])
    monkeypatch.setattr(module, "_compile", compile_now)
    monkeypatch.setattr(module, "_check_flags", lambda compiler, level: None)
    return made


@pytest.mark.one_is_quick
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(tmp_path, quick_compiler, damage, caplog):
    path = build(Level.PORTABLE, tmp_path)
    assert "compiling the CPU kernels for portable, once" in caplog.text
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    caplog.clear()
    assert build(Level.PORTABLE, tmp_path) == path
    assert is_intact(path)
    assert f"{path} is damaged and is compiled again" in caplog.text
    assert len(quick_compiler) == 2
    caplog.clear()
    build(Level.PORTABLE, tmp_path)
    assert not caplog.text


def test_a_folder_at_the_librarys_place_is_an_error(tmp_path, quick_compiler):
    path = build(Level.PORTABLE, tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BuildError, match="cannot be written"):
        build(Level.PORTABLE, tmp_path)


def test_a_folder_of_others_is_told_and_not_used(tmp_path, quick_compiler, monkeypatch, caplog):
    used = []
    monkeypatch.setattr(cpu_kernels, "CpuKernels", lambda path, **options: used.append(path))
    monkeypatch.setattr(cpu_kernels, "build", build_function)
    planted = build(Level.PORTABLE, tmp_path)
    tmp_path.chmod(0o777)
    load(tmp_path, Level.PORTABLE)
    assert used != [planted]
    assert len(used) == 1
    assert "may be written by other users" in caplog.text
    assert "Until then the kernels are compiled for each process anew" in caplog.text


def test_two_builders_at_once_write_one_library(tmp_path, quick_compiler):
    threads = [threading.Thread(target=build, args=(Level.PORTABLE, tmp_path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.iterdir()
    assert is_intact(path)


@pytest.mark.long
def test_two_processes_at_once_compile_and_load(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from mmdeploy_llm.kernels.cpu import Level, build, CpuKernels\n"
        "CpuKernels(build(Level.PORTABLE, Path(sys.argv[1]), ('-O0',)))\n"
        "print('loaded')"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [process.communicate(timeout=1800) for process in both]
    assert [out for out, _ in ends] == ["loaded\n"] * 2, ends
    assert len(list(tmp_path.iterdir())) == 1
