"""cpu_affinity and numa_node, checked by asking the system where the threads of a generating
process run."""

import subprocess
import sys

import pytest

from mmdeploy_llm import LLM, ConfigError
from mmdeploy_llm.kernels.cpu import usable_cpus
from mmdeploy_llm.testing.tiny import write_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

PROGRAM = """
import pathlib, sys, threading
from mmdeploy_llm import LLM, SamplingParams

def allowed():
    texts = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/status")]
    rows = [text.split() for text in texts]
    return {row[row.index("Pid:") + 1]: row[row.index("Cpus_allowed_list:") + 1] for row in rows}

def of(thread):
    return allowed()[str(thread.native_id)]

me = threading.current_thread()
before = of(me)
with LLM(sys.argv[1], cpu_affinity=[int(sys.argv[2])], num_threads=2, native_kernels=True) as llm:
    other = threading.Thread(target=lambda: print(of(threading.current_thread()) == before))
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    other.start()
    other.join()
    print(of(llm._desk.thread), of(me) == before)
    placed = [cpus for cpus in allowed().values() if cpus != before]
    print(len(placed) > 1, sorted(set(placed)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny("qwen2", tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.full
def test_the_engines_threads_alone_are_placed(folder):
    last = str(usable_cpus()[-1])
    command = [sys.executable, "-c", PROGRAM, folder, last]
    done = subprocess.run(command, capture_output=True, text=True)
    if "needs the C++ kernels" in done.stderr:
        pytest.skip("no kernels on this machine")
    lines = ["True", f"{last} True", f"True ['{last}']"]
    assert done.stdout.splitlines() == lines, done.stderr[-3000:]


def test_without_kernels_no_thread_can_be_placed(folder):
    with pytest.raises(ConfigError, match=r"cpu_affinity needs the C\+\+ kernels .* is False"):
        LLM(folder, cpu_affinity="auto", native_kernels=False)
    with pytest.raises(ConfigError, match=r"numa_node needs the C\+\+ kernels"):
        LLM(folder, numa_node=0, native_kernels=False)


def test_cpus_that_are_not_there(folder):
    with pytest.raises(ConfigError, match="cpu_affinity = 100000, but this process may use"):
        LLM(folder, cpu_affinity=[100_000])
