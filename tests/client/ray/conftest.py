"""A cluster of several raylets on this machine, and a plugin that kills at certain names."""

import io
import os
from textwrap import dedent

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.tiny import write_tiny

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_start_wait_time_s": "300",  # on a busy machine more than the usual 30
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
}
STORE_BYTES = 80 * 2**20
OPTIONS = {
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "num_gpu_blocks_override": 32,
    "use_warmup": False,
    "media_fetch_timeout": 600,
    "media_timeout": 600,
}
PARAMS = {"max_tokens": 4, "temperature": 0}
PROMPT = "What is {title}?"
# At a file of one of these names: kills the process of the engine, or its raylet; "once" only the
# first time that any process meets it. "hold" waits until the folder has a file "go". Each death
# leaves a file.
PLUGIN = """
import os, signal, time
from pathlib import Path
from mmdeploy_llm.hooks import hookimpl

FOLDER = Path({folder!r})

@hookimpl(tryfirst=True)
def fetch_media(ref, limits):
    name = ref.uri.rpartition("/")[2]
    while name.startswith("hold-") and not (FOLDER / "go").exists():
        time.sleep(0.01)
    if not name.startswith("kill-") or ("-once" in name and any(FOLDER.glob(name + "*"))):
        return None
    (FOLDER / (name + "." + str(len(list(FOLDER.iterdir()))))).touch()
    os.kill(os.getppid() if "-raylet" in name else os.getpid(), signal.SIGKILL)
    signal.pause()
"""


class Machines:
    """A cluster, and the folder in which the plugin leaves a file for each death."""

    def __init__(self, cluster, folder):
        self._cluster, self._folder = cluster, folder
        self.address = cluster.address

    def add(self):
        """Adds a raylet that has room for two engines and one task."""
        self._cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)

    def remove_all(self):
        """Removes all raylets but the head, also those that were killed."""
        for node in list(self._cluster.worker_nodes):
            self._cluster.remove_node(node)
        # Of those that were killed the head learns by missing heartbeats.
        self._cluster.wait_for_nodes(timeout=120)
        (self._folder / "go").unlink(missing_ok=True)

    def go_on(self):
        """Lets those go on that "hold" has stopped."""
        (self._folder / "go").touch()

    def num_deaths(self, name):
        """Returns how often the plugin has killed at this name."""
        return len(list(self._folder.glob(f"{name}.*")))


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Starts a head without CPUs, whose raylets have the plugin: programs that are started while it
    runs have it too."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("deaths")
    (site / "killing_llm.py").write_text(dedent(PLUGIN.format(folder=str(folder))))
    info = site / "killing_llm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: killing-llm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmdeploy_llm]\nkilling = killing_llm\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "PYTHONPATH": str(site)}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster  # reads the environment

        options = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=options)
        yield Machines(cluster, folder)
        cluster.shutdown()


@pytest.fixture
def machines(head):
    """The head and one raylet."""
    head.add()
    yield head
    head.remove_all()


@pytest.fixture
def connected(machines):
    """The machines, with this process as their driver."""
    import ray

    ray.init(address=machines.address, logging_level="error", log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield machines
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(write_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny")))


def picture(number):
    """A PNG file of noise."""
    pixels = np.random.default_rng(number).integers(0, 255, (28, 56, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def rows(tmp_path):
    """rows(count, *names) -> rows with pictures in files; rows 5 and 17 have these names."""

    def made(count, *names):
        special, found = dict(zip((5, 17), names, strict=False)), []
        for number in range(count):
            path = tmp_path / special.get(number, f"{number}.png")
            path.write_bytes(picture(number))
            title = f"fox {number}"
            found.append({"key": f"k{number}", "title": title, "image": str(path)})
        return found

    return made


@pytest.fixture(scope="module")
def texts_of(model):
    """texts_of(rows) -> the text that one engine in this process gives for each, by key."""
    params = SamplingParams(**PARAMS)
    with LLM(model, quiet=True, **OPTIONS) as llm:

        def answered(given):
            chats = [
                [
                    {"type": "image", "image": picture(int(row["key"][1:]))},
                    {"type": "text", "text": PROMPT.format(**row)},
                ]
                for row in given
            ]
            messages = [[{"role": "user", "content": content}] for content in chats]
            outputs = llm.chat(messages, params, use_tqdm=False)
            texts = (output.outputs.text.strip() for output in outputs)
            return dict(zip([row["key"] for row in given], texts, strict=True))

        yield answered


@pytest.fixture(scope="module")
def environment(head):
    """The environment of programs that are drivers: without the plugin, which would kill them when
    they read pictures for a report."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
