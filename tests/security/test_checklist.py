"""Sixteen requirements on an engine that reads media from strangers, with one test or more for
each, named after it. Each package has detailed tests; these follow the whole path."""

import ast
import functools
import json
import socket
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmdeploy_llm.engine.intake.tokenizer import load_tokenizer
from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MediaError,
    MediaLimitError,
    MediaTimeoutError,
    MMDeployLLMError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.media.isolation import Workers
from mmdeploy_llm.system.portable import children
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import (
    AttentionChoice,
    MachineLimits,
    ModelLimits,
    resolve,
)
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.tree import shipped

ROOT = Path(__file__).parents[2]
HERE = {"allow_urls": True, "allowed_domains": ("127.0.0.1",), "allow_private_addresses": True}
PLACE = "<|image_pad|>"


@functools.cache
def trees():
    """(name, syntax tree) of every shipped file."""
    return [(name, ast.parse(path.read_bytes())) for name, path in shipped().items()]


def png(width, height, body=b""):
    """Returns a PNG that claims a size and has almost no pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


# 1 no network by default; allowlist; every redirect and resolved address checked; one URL parser


@pytest.mark.full
def test_01_no_network_by_default(real, generate, chat, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    intake = real()
    for ask in (generate, chat):
        for url in ("http://example.com/x.png", "https://127.0.0.1/x.png", "s3://bucket/x.png"):
            with pytest.raises(UnsupportedMediaError, match=r"allow(ed)?_media_"):
                ask(intake, url)


def test_01_options_turn_urls_on(serve, real, generate, chat, picture):
    server = serve({"/a/photo.png": picture(seed=1), "/b.png": picture(seed=2)})
    intake = real(**HERE)
    request = generate(intake, f"{server.url}/a/photo.png", f"{server.url}/b.png?size=1")
    assert len({span.item.key for span in request.media}) == 2
    assert chat(intake, f"{server.url}/b.png").media[0].item.key == request.media[1].item.key
    config = EngineConfig(model="m", allowed_media_domains=("*.example.com",))
    assert (config.allow_media_urls, config.allow_private_media_addresses) == (False, False)
    assert EngineConfig(model="m").allowed_media_domains == ()


def test_01_hosts_redirects_and_addresses_are_checked(serve, real, generate, chat, picture):
    server = serve({"/x": "http://169.254.169.254/x", "/y": "http://localhost/y", "/z": picture()})
    for ask in (generate, chat):
        for path in ("/x", "/y"):
            with pytest.raises(MediaError, match="allowed_media_domains"):
                ask(real(**HERE), server.url + path)
        with pytest.raises(MediaError, match="not a public one"):
            ask(real(allow_urls=True), server.url + "/z")
    assert "/z" not in server.paths


@pytest.mark.full
def test_01_one_url_parser():
    """The code that fetches URLs imports urllib's parser in one file, and no other parser."""
    users = {
        name
        for name, tree in trees()
        if name.startswith("mmdeploy_llm_processors/remote/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "urllib" in str(node.module)
    }
    assert users == {"mmdeploy_llm_processors/remote/url.py"}


# 2 local paths confined to a root, symlinks resolved


def test_02_local_paths_are_confined(real, generate, chat, picture, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "in.png").write_bytes(picture())
    (tmp_path / "out.png").write_bytes(picture())
    (root / "link.png").symlink_to(tmp_path / "out.png")
    intake = real(allowed_root=root.resolve())
    assert generate(intake, root / "in.png").media
    paths = (tmp_path / "out.png", root / "../out.png", root / "link.png")
    for path in paths:
        for ask, name in ((generate, str(path)), (chat, path.as_uri()), (chat, f"file://{path}")):
            with pytest.raises(MediaError, match="allowed_media_root") as caught:
                ask(intake, name)
            assert name in str(caught.value)  # and not what it leads to


# 3 sizes from headers before decoding, counts before anything


def test_03_limits_are_checked_before_decoding(real, generate):
    start = time.monotonic()
    with pytest.raises(MediaLimitError, match="178956970"):
        generate(real(), png(60_000, 60_000))
    with pytest.raises(MediaLimitError, match="bytes"):
        generate(real(max_bytes=100), png(8, 8, b"x" * 10_000) + b"x" * 100)
    assert time.monotonic() - start < 60


def test_03_counts_are_checked_before_anything_is_opened(real, generate, serve):
    server = serve({})
    with pytest.raises(MediaLimitError, match="Too many image items"):
        generate(real(**HERE), *[f"{server.url}/{i}.png" for i in range(21)])
    assert server.paths == []


def test_03_video_limits(manager):
    videos = pytest.importorskip("mmdeploy_llm.media.video.frames")
    frames = [np_frame() for _ in range(3)]
    with pytest.raises(MediaLimitError, match="3 frames, 2 are allowed"):
        videos.FrameList(frames, MediaLimits(max_frames=2))
    timeline = pytest.importorskip("mmdeploy_llm.media.video.timeline")
    with pytest.raises(MediaLimitError, match="36000 seconds"):
        timeline.check_duration(36_000.0, MediaLimits())


def np_frame():
    import numpy as np

    return np.zeros((28, 28, 3), dtype=np.uint8)


# 4 format allowlist; orientation, transparency and animation normalised


@pytest.mark.parametrize(
    "blob",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n",
        b"%PDF-1.4\n",
        b"8BPS\0\1" + b"\0" * 40,
        b"SIMPLE  =                    T" + b" " * 2850,
        b"\xd7\xcd\xc6\x9a" + b"\0" * 40,
        b"\x89HDF\r\n\x1a\n" + b"\0" * 40,
        b"P6 8 8 255\n" + b"\0" * 192,
        b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0" * 40,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
    ids=["EPS", "PDF", "PSD", "FITS", "WMF", "HDF5", "PPM", "JPEG 2000", "SVG"],
)
def test_04_only_listed_image_formats(blob, real, generate):
    with pytest.raises(UnsupportedMediaError):
        generate(real(), blob)


@pytest.mark.full
def test_04_pillow_opens_nothing_by_its_own_choice():
    """Image.open without formats would try every one that Pillow has."""
    calls = [
        f"{name}:{node.lineno}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("Image.open", "PIL.Image.open")
        and "formats" not in [keyword.arg for keyword in node.keywords]
    ]
    assert calls == []


# 5 decoding in a worker that can be killed


HOSTILE = """
import os, signal, time
import numpy as np

def hang(blob):
    time.sleep(1000)
    yield {}, None

def devour(blob):
    np.ones(3 << 30, np.uint8)
    yield {}, None

def crash(blob):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield {}, None

def answer(blob):
    yield {"size": len(blob)}, None
"""


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("function", "kind"),
    [("hang", MediaTimeoutError), ("devour", MediaLimitError), ("crash", MediaError)],
)
def test_05_decoding_can_be_killed(function, kind, tmp_path, monkeypatch):
    """A codec that hangs, uses all memory or crashes fails its item; the next one is decoded."""
    (tmp_path / "hostile_codec.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    workers, limits = Workers(), {"timeout": 60.0, "max_memory": 2**31}
    try:
        assert list(workers.stream("hostile_codec:answer", b"abc", {}, **limits))
        short = limits | {"timeout": 1.0 if function == "hang" else 60.0}
        with pytest.raises(kind):
            list(workers.stream(f"hostile_codec:{function}", b"", {}, **short))
        ((fields, _),) = workers.stream("hostile_codec:answer", b"abc", {}, **limits)
        assert fields == {"size": 3}
    finally:
        workers.close()


def test_05_video_is_isolated_unless_asked_otherwise():
    assert EngineConfig(model="m").media_isolation == "auto"
    assert EngineConfig(model="m").media_timeout > 0
    assert EngineConfig(model="m").media_process_memory > 0


# 6 identity of an item


def test_06_identity_covers_content_shape_type_and_options(real, generate):
    import numpy as np

    intake = real()
    flat = np.arange(56 * 112 * 3, dtype=np.uint8)
    images = [flat.reshape(56, 112, 3), flat.reshape(112, 56, 3), flat.reshape(56, 112, 3) ^ 1]
    keys = [generate(intake, image).media[0].item.key for image in images]
    assert len(set(keys)) == 3
    assert generate(intake, images[0].copy()).media[0].item.key == keys[0]


def test_06_callers_cannot_name_the_key(real):
    part = {"type": "image_url", "image_url": {"url": "data:,x"}, "uuid": "chosen"}
    with pytest.raises(RequestError) as caught:
        real().accept({"messages": [{"role": "user", "content": [part]}]}, SamplingParams())
    assert "chosen" not in str(caught.value)


# 7 placeholder text typed by a user


def test_07_placeholder_text_is_escaped_or_an_error(real, chat, picture):
    with pytest.raises(RequestError):
        real().accept(f"look {PLACE}", SamplingParams())
    part = {"type": "image", "image": picture()}
    text = {"type": "text", "text": f"{PLACE} <|image@placeholder|> what is it?"}
    (request,) = real().accept(
        {"messages": [{"role": "user", "content": [text, part]}]}, SamplingParams()
    )
    assert len(request.media) == 1


# 8 features against placeholders before the model runs


def test_08_features_and_placeholders_agree(real, generate, picture):
    request = generate(real(), picture(), picture(112, 56))
    place = max(set(request.prompt_token_ids), key=request.prompt_token_ids.count)
    spans = [span.item.num_tokens for span in request.media]
    assert request.prompt_token_ids.count(place) == sum(spans)
    for images, count in ((2, 1), (1, 2)):
        prompt = {"prompt": PLACE * count, "multimodal_data": {"image": [picture()] * images}}
        with pytest.raises(RequestError):
            real().accept(prompt, SamplingParams())


# 9 no pickle on any path

UNSAFE_MODULES = {"cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec", "np.fromfile"}
# They pickle what passes between processes.
UNSAFE_NAMES = {"ProcessPoolExecutor", "BaseManager", "SyncManager", "SharedMemoryManager"}
PICKLING = {"Queue", "SimpleQueue", "JoinableQueue", "Pool", "Manager", "Pipe"}
# An engine and the processes that it starts itself talk over a pair of sockets without a name,
# which only these two hold: what is read there, this program has written. See the test below.
OWN_PROCESSES = {("mmdeploy_llm/system/processes/wire.py", "pickle")}


def unsafe(tree):
    """Finds lines that deserialise, or could deserialise, data from others."""
    found, uses_processes = [], "multiprocessing" in imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            names = {alias.name for alias in node.names}
            roots = {str(name).partition(".")[0] for name in {module, *names} if name}
            bad = roots & (UNSAFE_MODULES | UNSAFE_NAMES)
            found += [(node.lineno, name) for name in bad]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in UNSAFE_CALLS or any(key.arg == "allow_pickle" for key in node.keywords):
            found.append((node.lineno, name))
        last = name.rpartition(".")[2]
        is_of_threads = name.startswith("queue.")
        is_pickling = last in PICKLING or (last == "recv" and not node.args)
        if uses_processes and is_pickling and not is_of_threads:
            found.append((node.lineno, name))
    return found


def imported(tree):
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names


def test_09_no_pickle():
    found = {(name, what) for name, tree in trees() for _, what in unsafe(tree)}
    assert found == OWN_PROCESSES


def test_09_processes_talk_over_sockets_without_a_name():
    """Nothing listens, so no other process can write what a child or its parent reads."""
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = children.start([sys.executable, "-c", "pass"], **nowhere)
    with child.process, child.peer as own, open(child.lifeline, "wb"):
        assert own.family == socket.AF_UNIX
        assert own.getsockname() == own.getpeername() == ""
        assert not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "import multiprocessing\nconnection.recv()",
        "from multiprocessing import Queue\nQueue()",
        "from concurrent.futures import ProcessPoolExecutor",
        "eval(text)",
    ],
)
def test_09_the_scan_for_pickle_finds_it(code):
    assert unsafe(ast.parse(code))


def test_09_pickled_weights_are_refused(tmp_path):
    from mmdeploy_llm.weights.find import find_weights

    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="pickle files"):
        find_weights(tmp_path)


# 10 no code from checkpoints


def test_10_remote_code_is_never_run(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Config", "evil.Config"]}
    nested = {"model_type": "evil", "auto_map": auto_map}
    for config in (nested, {"model_type": "qwen2_5_vl", "vision_config": nested, **nested}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(nested))
        with pytest.raises(CheckpointError):
            read_checkpoint(tmp_path)
        with pytest.raises(CheckpointError):
            load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_10_remote_code_cannot_be_switched_on():
    with pytest.warns(UserWarning, match="never run"):
        assert EngineConfig(model="m", trust_remote_code=True).trust_remote_code is False
    given = [
        (name, ast.unparse(key.value))
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for key in node.keywords
        if key.arg == "trust_remote_code"
    ]
    assert given
    assert {value for _, value in given} == {"False"}


# 11 chat templates sandboxed, with a time limit


def test_11_templates_are_sandboxed_and_end(real):
    intake, messages = real(), [{"role": "user", "content": "hi"}]
    attack = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    with pytest.raises(RequestError, match="SecurityError"):
        intake.accept({"messages": messages, "chat_template": attack}, SamplingParams())
    from mmdeploy_llm.engine.intake import template

    assert template.RENDER_SECONDS == 30
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match=r"within 0\.2 s"):
        template.render(
            SimpleNamespace(special_tokens_map={}),
            endless,
            messages,
            {},
            renderer=intake._renderer,
            seconds=0.2,
        )


# 12 bounded caches, n, stop texts, grammars


def test_12_counts_in_params_are_bounded():
    for wrong in ({"n": 1025}, {"stop": ["x"] * 1025}, {"bad_words": ["x"] * 1025}):
        with pytest.raises(ConfigError):
            SamplingParams(**wrong)


def test_12_caches_are_bounded_in_bytes(make_intake, processor):
    intake = make_intake(cache_bytes=250)  # each item has 100
    for number in range(2, 12):
        prompt = {"prompt": PLACE, "multimodal_data": {"image": str(number).encode()}}
        intake.accept(prompt, SamplingParams())
        assert intake.media.stats["processed"].num_bytes <= 250
    model = ModelLimits(dtype="float32", max_position_embeddings=64, hidden_size=8)
    config = EngineConfig(model="m", encoder_cache_memory=320)
    host = MachineLimits(has_cuda=False, num_cpus=1, num_threads=1)
    choice = AttentionChoice(name="reference", block_size=64)
    runtime = resolve(config, model, host, lambda *asked: choice)
    assert runtime.encoder_cache_tokens == 10


# 13 messages without addresses, and without paths but those that the caller gave


@pytest.mark.full
def test_13_messages_hold_no_addresses_and_no_other_paths(real, generate, chat, tmp_path):
    secret, given = tmp_path / "secret_folder", tmp_path / "given"
    secret.mkdir()
    given.symlink_to(secret)
    (secret / "bad.png").write_bytes(b"no image")
    (secret / "cut.png").write_bytes(png(99, 99))
    paths = [given / name for name in ("bad.png", "cut.png", "gone.png", "..")]
    sources = [*map(str, paths), object(), {"a": object()}, b"", b"GIF89a", memoryview(b"x"), 5]
    for source in sources:
        with pytest.raises(RequestError) as caught:
            generate(real(), source)
        assert "secret_folder" not in str(caught.value)
        assert "0x" not in str(caught.value)
    for path in paths:
        with pytest.raises(RequestError) as caught:
            chat(real(), path.as_uri())
        assert "secret_folder" not in str(caught.value)


# 14 the engine outlives every fault; order and length of results


def test_14_every_fault_is_one_items_error(real, generate, picture):
    """Checks the intake; the tests of the whole engine check that the batch continues."""
    intake, good = real(), picture()
    key = generate(intake, good).media[0].item.key
    faults = [b"", good[:50], good[:-30] + b"\0" * 30, b"\xff\xd8\xff", png(1, 1), png(1, 100_000)]
    for fault in [*faults, "gone.png", "data:,", 3.5, object()]:
        with pytest.raises(MMDeployLLMError) as caught:
            generate(intake, fault)
        assert isinstance(caught.value, RequestError)
        assert generate(intake, good).media[0].item.key == key


# 15 plugins by name only; a broken one stops nothing


def test_15_plugins_by_name_and_broken_ones():
    class Broken:
        pass

    names = {plugin.name for plugin in PluginManager.load(("ernie", "sources")).plugins}
    assert names == {"ernie", "sources"}
    blocked = PluginManager.load(None, ("remote",))
    assert "remote" not in {plugin.name for plugin in blocked.plugins if plugin.provides}
    with pytest.raises(MMDeployLLMError, match="unknown_plugin"):
        PluginManager.load(("unknown_plugin",))


def test_15_a_fetcher_that_raises_costs_its_item_only(make_intake, picture, real_processor):
    from mmdeploy_llm.hooks import hookimpl

    class Broken:
        @hookimpl
        def fetch_media(self, ref, limits):
            if "broken" in ref.uri:
                raise KeyError("inside")

    manager = PluginManager.load(("sources",))
    manager.register(Broken(), name="broken")
    intake = make_intake(
        processors={"image": real_processor}, fetch=manager.fetch_media, encoder_cache_tokens=4096
    )
    prompt = {"prompt": PLACE, "multimodal_data": {"image": "store://broken"}}
    with pytest.raises(MediaError, match="'broken'"):
        intake.accept(prompt, SamplingParams())
    prompt["multimodal_data"] = {"image": picture()}
    assert intake.accept(prompt, SamplingParams())


# 16 every advisory class has a test named after it

CLASSES = (
    "ssrf",
    "redirect",
    "parser_disagreement",
    "typed_placeholders",
    "hash_ignores_shape",
    "decompression_bomb",
    "unbounded_frames",
    "huge_n",
    "redos",
    "remote_code",
    "address_leak",
    "eps",
    "count_limits",
    "cache_growth",
    "template",
    "path_traversal",
    "pickle",
    "tiny_image",
)


def test_16_every_advisory_class_has_a_test():
    tree = ast.parse((Path(__file__).parent / "test_advisories.py").read_text())
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    missing = [each for each in CLASSES if not any(f"test_{each}" in name for name in tests)]
    assert missing == []


@pytest.mark.full
def test_limits_are_what_the_options_say():
    """Every option of the engine reaches the plugins."""
    from mmdeploy_llm.media.loading.reader import media_limits

    config = EngineConfig(
        model="m",
        allowed_media_domains=("a.org",),
        allow_private_media_addresses=True,
        allowed_media_schemes=("s3",),
        media_fetch_timeout=7,
        max_media_bytes=11,
    )
    limits = media_limits(config)
    expected = replace(
        limits,
        allow_urls=True,
        allowed_domains=("a.org",),
        allow_private_addresses=True,
        allowed_schemes=("s3",),
        fetch_timeout=7,
        max_bytes=11,
    )
    assert limits == expected
    assert media_limits(EngineConfig(model="m", allow_media_urls=True)).allow_urls
    assert not media_limits(EngineConfig(model="m")).allow_urls
