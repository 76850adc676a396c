"""One LLM and the processes and threads of the program around it: forks, `close` in another thread,
the end of the program. Each case runs in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

SEVERAL = {"tensor_parallel_size": 2, "num_threads": 2}, {"data_parallel_size": 2, "num_threads": 2}
ENGINES = [{}, *(pytest.param(options, marks=pytest.mark.long) for options in SEVERAL)]
# Triton's bindings list what they still hold when a forked child ends, which lacks the threads that
# hold it; Triton is there only where another test has asked for its interpreter.
OTHERS = ("nanobind:", " - ", "See https://nanobind.")
HEAD = """
import gc, os, sys, threading, time
from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import EngineError
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
def text(llm):
    return llm.generate("A red", SHORT, use_tqdm=False)[0].outputs.text
"""


@pytest.fixture
def program(run_program, tmp_path):
    """program(body, **options): what a program prints with `llm` open, which leaves nothing over:
    no message, no process, no temporary file."""

    def printed(body, seconds=300, **options):
        lines = [
            HEAD,
            f"llm = LLM('shapes-vl', quiet=True, max_model_len=1100, **{options})",
            textwrap.dedent(body),
        ]
        env = {"TMPDIR": str(tmp_path)}
        done = run_program("\n".join(lines), env=env, timeout=seconds)
        assert [line for line in done.stderr.splitlines() if not line.startswith(OTHERS)] == []
        assert done.returncode == 0
        assert [path for path in os.listdir(tmp_path) if path.startswith("mmdeploy")] == []
        return done.stdout.splitlines()

    return printed


CHILD = """
before = text(llm)
running = llm.stream("A red", LONG)
next(running)
files = sorted(os.listdir(os.environ["TMPDIR"]))
calls = {
    "generate": lambda: llm.generate("x"),
    "chat": lambda: llm.chat([{"role": "user", "content": "x"}]),
    "stream": lambda: llm.stream("x"),
    "generate_iter": lambda: llm.generate_iter(["x"]),
    "answer_each": lambda: llm.answer_each([]),
    "run_batch": lambda: llm.run_batch([{"prompt": "x"}], os.environ["TMPDIR"] + "/never.jsonl"),
    "count_tokens": lambda: llm.count_tokens("x"),
    "cache_stats": llm.cache_stats,
    "close": llm.close,
    "a running stream": lambda: next(running),
}
pid = os.fork()
if not pid:
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except EngineError as error:
            if "forked" not in str(error) or "spawn" not in str(error):
                wrong.append((name, str(error)))
        else:
            wrong.append(name)
    running.close()
    with llm:
        pass
    print("wrong:", wrong)
    sys.exit(7)
print(os.waitpid(pid, 0)[1] >> 8)
print(sorted(os.listdir(os.environ["TMPDIR"])) == files)
print(sum(len(each.outputs.token_ids) for each in running) > 900)
print(text(llm) == before)
pid = os.fork()  # one that lives longer than the engine, which does not wait for it
if not pid:
    time.sleep(3000)
llm.close()
os.kill(pid, 9)
"""


@pytest.mark.full
@pytest.mark.parametrize("options", ENGINES, ids=["one", "ranks", "engines"])
def test_a_forked_child_is_refused_and_harms_nothing(options, program):
    found = program(CHILD, **options)
    assert found == ["wrong: []", "7", "True", "True", "True"]


@pytest.mark.full
def test_a_child_may_make_its_own(program):
    """OpenMP's threads of the parent do not exist in the child, which would wait for them."""
    body = """
    before = text(llm)
    import torch
    pid = os.fork()
    if not pid:
        torch.ones(2000, 2000).add_(1)
        with LLM("shapes-vl", quiet=True) as own:
            os._exit(0 if text(own) == before else 1)
    print(os.waitpid(pid, 0)[1], text(llm) == before)
    """
    assert program(body, num_threads=2) == ["0 True"]


@pytest.mark.full
def test_pools_and_data_loaders_work_beside_it(program):
    body = """
    import multiprocessing
    from torch.utils.data import DataLoader
    before = text(llm)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(abs, [-1, 2]))
        try:
            pool.map(llm.generate, ["x"])
        except TypeError as error:
            print("make an LLM there" in str(error))
    print([int(batch.sum()) for batch in DataLoader([1, 2, 3, 4], batch_size=2, num_workers=2)])
    print(text(llm) == before)
    """
    assert program(body) == ["[1, 2]", "True", "[3, 7]", "True"]


CLOSED = """
calls = {
    "generate": lambda: llm.generate(["A red"] * 500, LONG, use_tqdm=False),
    "stream": lambda: list(llm.stream(["A red"] * 500, LONG)),
    "generate_iter": lambda: list(llm.generate_iter(("A red" for _ in range(9999)), LONG)),
    "run_batch": lambda: llm.run_batch(
        ({"prompt": "A red"} for _ in range(9999)), os.environ["TMPDIR"] + "/a.jsonl",
        sampling_params=LONG, use_tqdm=False),
}
ends = {}
def run(name):
    try:
        calls[name]()
    except EngineError as error:
        ends[name] = "closed while" in str(error)
threads = [threading.Thread(target=run, args=(name,)) for name in calls]
for thread in threads:
    thread.start()
while len(llm._desk._held) <= 3 * llm._desk.max_begun:  # until all four have begun
    time.sleep(0.01)
closers = [threading.Thread(target=llm.close) for _ in range(2)]
for closer in closers:
    closer.start()
for thread in closers + threads:
    thread.join(60)
llm.close()
print(sorted(ends) == sorted(calls), all(ends.values()))
try:
    llm.generate("x")
except EngineError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.parametrize("options", ENGINES, ids=["one", "ranks", "engines"])
def test_close_ends_the_runs_of_other_threads(options, program):
    found = program(CLOSED, **options)
    assert found == ["True True", "this LLM is closed; make a new one"]


@pytest.mark.full
def test_close_in_a_signal_handler_during_a_step(program):
    body = """
    import signal
    signal.signal(signal.SIGALRM, lambda *_: llm.close())
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        llm.generate(["A red"] * 500, LONG, use_tqdm=False)
    except EngineError as error:
        print("closed while" in str(error))
    """
    assert program(body) == ["True"]


END = """
running = llm.stream(["A red"] * 9, LONG)
next(running)
call = lambda: llm.generate(["A red"] * 500, LONG, use_tqdm=False)
threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.full
@pytest.mark.parametrize("options", ENGINES, ids=["one", "ranks", "engines"])
def test_the_program_ends_while_runs_are_on(options, program):
    assert program(END, **options) == []


@pytest.mark.full
def test_a_stream_holds_the_engine_that_nobody_else_has(program):
    body = """
    running = llm.stream("A red", LONG)
    next(running)
    del llm
    gc.collect()
    print(next(running).is_ok)
    del running
    gc.collect()
    """
    assert program(body) == ["True"]


STATE = """
import ctypes, logging, resource, signal, warnings
import torch
def num_files():
    # The least of several looks: the watch for a crowd opens a file for a moment, now and then.
    looks = []
    for _ in range(9):
        looks.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.01)
    return min(looks)
def settle():
    # Waits for the thread that moves memory to large pages.
    while any(thread.name == "large-pages" for thread in threading.enumerate()):
        time.sleep(0.01)
def environment():
    names = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = []
    while names[len(found)]:
        found.append(names[len(found)])
    return sorted(found)
def state():
    others = []
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return {
        "environment": (environment(), dict(os.environ)),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), others),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed(),
                  torch.get_float32_matmul_precision(), torch.get_rng_state().sum().item(),
                  torch.are_deterministic_algorithms_enabled()),
        "warnings": [str(each) for each in warnings.filters],
        "logging": (logging.root.level, logging.root.handlers[:], logging.root.manager.disable,
                    logging.getLogger("mmdeploy_llm").level,
                    logging.getLogger("mmdeploy_llm").handlers[:]),
        "signals": [signal.getsignal(each) for each in sorted(signal.valid_signals())
                    if each not in (signal.SIGKILL, signal.SIGSTOP)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "sys": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.excepthook, sys.path[:],
                sys.unraisablehook, threading.excepthook, sys.stdout, sys.stderr),
        "process": (os.getcwd(), os.umask(0o22), os.sched_getaffinity(0), os.nice(0)),
        "limits": [resource.getrlimit(each) for each in range(10)],
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "files": num_files(),
        "our threads": [thread.name for thread in threading.enumerate()
                        if thread.name != "tqdm_monitor"],
    }
"""


@pytest.mark.full
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_program_gets_its_settings_back(order, program):
    """Two engines have different settings and are closed in any order."""
    body = (
        STATE
        + f"""
llm.close()
settle()
torch.set_num_threads(1)
before = state()
cpu = min(os.sched_getaffinity(0))
two = [LLM("shapes-vl", quiet=True, num_threads=2, cpu_affinity=(cpu,)),
       LLM("shapes-vl", quiet=True, num_threads=1, cpu_affinity="auto")]
print([len(text(one)) > 0 for one in two], torch.get_num_threads())
print([name for name, value in state().items() if value != before[name]])
for index in {order}:
    two[index].close()
del two
gc.collect()
settle()
print([name for name, value in state().items() if value != before[name]])
"""
    )
    found = program(body)
    assert found[0] == "[True, True] 1"
    assert found[1] == "['environment', 'gc', 'our threads']"
    assert found[2] == "[]"


NUM_CPUS = len(os.sched_getaffinity(0))  # more threads than these are never chosen
THREADS = """
import torch
from mmdeploy_llm import LLM
{before}
with LLM("shapes-vl", quiet=True, **{options}) as llm:
    print(llm.runtime.num_threads, torch.get_num_threads())
print(torch.get_num_threads())
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "before", "options", "found"),
    [
        ({"OMP_NUM_THREADS": "1"}, "", {}, "1 1 1"),
        ({}, "torch.set_num_threads(11)", {}, f"{min(11, NUM_CPUS)} 11 11"),
        pytest.param(
            {"OMP_NUM_THREADS": "1"},
            "torch.set_num_threads(11)",
            {"num_threads": 2},
            "2 11 11",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_programs_number_of_threads(variables, before, options, found):
    code = THREADS.format(before=before, options=options)
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == found.split(), done.stderr
