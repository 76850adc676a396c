"""Building and loading the library."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from mmdeploy_llm.kernels.cpu import BuildError, CpuKernels, Level, build, cpu_levels, load
from mmdeploy_llm.kernels.cpu.build import (
    CALLS,
    COMPILERS,
    FLAGS,
    CompilerError,
    _command,
    _digest,
    source_digest,
)
from mmdeploy_llm.kernels.cpu.prebuilt import find_prebuilt, prebuild
from mmdeploy_llm.kernels.cpu.sealed import write_sealed
from mmdeploy_llm.values.options.types import CpuLevel

DRIVER = Path(__file__).parent / "driver.cpp"


def compiler():
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no C++ compiler on this machine")
    return found


@pytest.mark.full
def test_built_once(tmp_path, monkeypatch):
    compiler()
    quickly = ("-O0",)
    monkeypatch.setitem(build.__globals__, "UNITS", (CALLS / "low_rank.cpp",))  # the shortest
    path = build(Level.PORTABLE, tmp_path, quickly)
    before = path.stat()
    assert build(Level.PORTABLE, tmp_path, quickly) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        load(tmp_path)


AVX2 = "avx2 fma3 f16c"
AVX512 = f"{AVX2} avx512_f avx512_bw avx512_cd avx512_dq avx512_vl"
AMX = "amx_tile amx_bf16 amx_int8"
CAPABILITIES = {  # some of each processor's
    "Sapphire Rapids": f"{AVX512} avx512_vnni avx512_bf16 avx_vnni {AMX}",
    "Zen 4": f"{AVX512} avx512_vnni avx512_bf16",
    "Ice Lake": f"{AVX512} avx512_vnni",
    "Skylake-X": AVX512,
    "Alder Lake": f"{AVX2} avx_vnni",
    "Zen 3": AVX2,
    "Sandy Bridge": "avx sse4_2",
    "Neoverse V1": "neon fp16_arith bf16 i8mm dot",
    "without bf16": "neon fp16_arith i8mm dot",
    "Neoverse N1": "neon fp16_arith dot",
    "Cortex-A72": "neon",
}
LEVELS = {
    "Sapphire Rapids": "amx avx512_bf16 avx512_vnni avx512 avx2_vnni avx2 portable",
    "Zen 4": "avx512_bf16 avx512_vnni avx512 avx2 portable",
    "Ice Lake": "avx512_vnni avx512 avx2 portable",
    "Skylake-X": "avx512 avx2 portable",
    "Alder Lake": "avx2_vnni avx2 portable",
    "Zen 3": "avx2 portable",
    "Sandy Bridge": "portable",
    "Neoverse V1": "neon_bf16 neon_i8mm neon_dot portable",
    "without bf16": "neon_i8mm neon_dot portable",
    "Neoverse N1": "neon_dot portable",
    "Cortex-A72": "portable",
}
MACHINES = {
    "Neoverse V1": "arm64",
    "without bf16": "arm64",
    "Neoverse N1": "aarch64",
    "Cortex-A72": "arm64",
}


@pytest.mark.parametrize("processor", CAPABILITIES)
def test_levels_of_processors(processor, monkeypatch):
    has = {name: True for name in CAPABILITIES[processor].split()} | {"avx512_fp16": False}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: has)
    monkeypatch.setattr("torch.cpu._init_amx", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: MACHINES.get(processor, "x86_64"))
    assert [level.value for level in cpu_levels()] == LEVELS[processor].split()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert cpu_levels() == (Level.PORTABLE,)


def test_amx_is_left_out_where_the_system_does_not_grant_its_registers(monkeypatch):
    has = dict.fromkeys(CAPABILITIES["Sapphire Rapids"].split(), True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: has)
    monkeypatch.setattr("torch.cpu._init_amx", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert cpu_levels()[0] is Level.AVX512_BF16


def test_a_level_that_the_processor_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    with pytest.raises(BuildError, match="cannot execute avx2; it can execute portable"):
        load(tmp_path, Level.AVX2)


def test_a_compiler_that_is_older_than_a_level(tmp_path, monkeypatch, caplog, build_kernels):
    """The next level takes its place, and the kernels say which one they are. The compiler is
    asked about flags alone: each start asks again."""
    compiler()
    *better, last = cpu_levels()
    built = build_kernels(last)
    flags = {level: (*level.flags, "-no-such-option") for level in better}
    monkeypatch.setattr(Level, "flags", property(lambda self: flags.get(self, ())))
    command = _command(last)
    shutil.copy(built, tmp_path / f"kernels-{_digest(command)}.so")
    caplog.clear()  # of building it
    assert load(tmp_path).cpu_level == last.value
    assert len(caplog.messages) == len(better)
    for level, message in zip(better, caplog.messages, strict=True):
        assert f"cannot build the CPU kernels for {level.value}; those of a lower" in message
        assert "no-such-option" in message
    if better:  # a level that was asked for is not replaced
        with pytest.raises(CompilerError, match="no-such-option"):
            load(tmp_path, better[0])


@pytest.mark.full
def test_a_level_of_choice(tmp_path, build_kernels):
    compiler()
    folder = build_kernels(Level.PORTABLE).parent
    assert not load(folder, Level.PORTABLE).has_wide_registers
    assert {level.value for level in Level} == set(get_args(CpuLevel))


def test_without_a_home(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(BuildError, match="no home directory"):
        load()


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler()
    with pytest.raises(BuildError, match="no-such-option"):
        build(Level.PORTABLE, tmp_path, ("-no-such-option",))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    compiler()
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        build(cpu_levels()[0], tmp_path / "file" / "cache")


def test_a_library_of_something_else(tmp_path):
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot be loaded"):
        CpuKernels(path)


@pytest.mark.full
def test_one_openmp_runtime(build_kernels):
    """A second one would spin on the same cores."""
    compiler()
    program = (
        "import torch, pathlib, sys\n"
        "from mmdeploy_llm.kernels.cpu import load\n"
        "load(pathlib.Path(sys.argv[1]))\n"
        "maps = pathlib.Path('/proc/self/maps').read_text().split()\n"
        "print(len({path for path in maps if 'libgomp' in path or 'libomp' in path}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("the loaded libraries are listed on Linux alone")
    command = [sys.executable, "-c", program, str(build_kernels(cpu_levels()[0]).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.full
def test_the_driver_calls_the_kernels_as_they_are():
    """Only long tests run it."""
    command = [compiler(), "-std=c++17", "-fsyntax-only", f"-I{CALLS}", str(DRIVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize(
    "level", [Level.PORTABLE, Level.AVX2, Level.AVX512_BF16, Level.AMX], ids=str
)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_clean_under_a_sanitizer(tmp_path, level, sanitizer):
    """All kernels over random shapes, with threads that the sanitizer knows."""
    if level not in cpu_levels():
        pytest.skip(f"this processor has no {level.name}")
    program = tmp_path / "driver"
    flags = [flag for flag in (*FLAGS, *level.flags) if flag != "-fopenmp"]
    own = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1", "-pthread"]
    command = [compiler(), *flags, "-DMM_STD_THREADS", *own, f"-I{CALLS}", str(DRIVER)]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-3000:]


def test_a_library_of_the_wheel_is_used_for_the_same_sources_only(tmp_path, monkeypatch):
    compiler()
    level = cpu_levels()[0]
    assert find_prebuilt(level, tmp_path) is None
    path = tmp_path / f"{level.value}-{source_digest(level)}.so"
    (tmp_path / "new").mkdir()
    write_sealed(b"library", path, tmp_path / "new")
    assert find_prebuilt(level, tmp_path) == path
    monkeypatch.setattr(
        "mmdeploy_llm.kernels.cpu.prebuilt.source_digest", lambda _: "of other sources"
    )
    assert find_prebuilt(level, tmp_path) is None


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("symbols", "is_portable"),
    [
        (b"\0GLIBC_2.14\0GLIBCXX_3.4\0GCC_3.0\0", True),
        (b"\0GLIBC_2.28\0CXXABI_1.3.11\0", True),
        (b"\0GLIBC_2.29\0", False),
        (b"\0GLIBCXX_3.4.29\0", False),
    ],
)
def test_the_name_of_the_wheel_tells_which_runtimes_it_needs(
    tmp_path, monkeypatch, symbols, is_portable
):
    monkeypatch.setattr(
        "mmdeploy_llm.kernels.cpu.prebuilt.compile_level", lambda _, path: path.write_bytes(symbols)
    )
    expected = "manylinux_2_28_x86_64" if is_portable else "linux_x86_64"
    assert prebuild(tmp_path / "prebuilt") == expected


ARM_COMPILERS = {
    "gcc": ["aarch64-linux-gnu-g++"],
    # Clang warns of every loop that it cannot vectorise.
    "clang": ["clang++", "--target=aarch64-linux-gnu", "-Wno-pass-failed"],
}


# Each level on a processor that has no more than it needs, where the emulator knows one.
ARM_PROCESSORS = {
    Level.PORTABLE: "cortex-a53",
    Level.NEON_DOT: "neoverse-n1",
    Level.NEON_I8MM: "max,sve=off",
    Level.NEON_BF16: "max,sve=off",
}


@pytest.mark.long
@pytest.mark.parametrize("level", ARM_PROCESSORS, ids=str)
@pytest.mark.parametrize("name", ARM_COMPILERS)
def test_clean_on_arm(tmp_path, name, level):
    """All kernels and the values of products with NEON, in an emulator, in minutes."""
    cross, emulator = ARM_COMPILERS[name], shutil.which("qemu-aarch64")
    needed = [cross[0], "aarch64-linux-gnu-g++"]  # clang uses GCC's C++ library
    if emulator is None or not all(map(shutil.which, needed)):
        pytest.skip(f"needs {', '.join(needed)} and qemu-user")
    program = tmp_path / "driver"
    flags = [flag for flag in FLAGS if flag != "-fopenmp"]
    own = ["-fopenmp-simd", "-static", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command = [
        *cross,
        *flags,
        *level.flags,
        "-DMM_STD_THREADS",
        *own,
        f"-I{CALLS}",
        str(DRIVER),
    ]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True)
    run = [emulator, "-cpu", ARM_PROCESSORS[level], str(program)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-3000:]
