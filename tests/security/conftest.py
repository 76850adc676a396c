"""Shared by the security tests: the intake of the intake tests, with the real media plugins."""

import contextlib
import http.server
import importlib.util
import io
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm.hooks import Checkpoint, MediaLimits, PluginManager
from mmdeploy_llm.values.params import SamplingParams

ROOT = Path(__file__).parents[2]
PLACE = "<|image_pad|>"

_spec = importlib.util.spec_from_file_location(
    "security_intake_fixtures", ROOT / "tests/engine/intake/conftest.py"
)
_intake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_intake)
raw_tokenizer, tokenizer, config = _intake.raw_tokenizer, _intake.tokenizer, _intake.config
processor, make_intake = _intake.processor, _intake.make_intake


@pytest.fixture(scope="session")
def manager():
    return PluginManager.load(plugins=("qwen", "remote", "sources"))


@pytest.fixture
def real_processor(manager, tmp_path):
    """Returns a processor of a family that accepts any image."""
    spec = manager.media_processor("image", "qwen2_5_vl")
    return manager.build(spec, Checkpoint(folder=tmp_path, config=SimpleNamespace()), {})


@pytest.fixture
def real(make_intake, manager, real_processor):
    """Returns limits -> an Intake with the installed image processor and sources."""

    def make(**limits):
        return make_intake(
            processors={"image": real_processor},
            fetch=manager.fetch_media,
            limits=MediaLimits(**limits),
            limit_mm_per_prompt={"image": 20},
            max_model_len=4096,
            encoder_cache_tokens=4096,
            chat_template=_intake.TEMPLATE.replace("<|image@placeholder|>", PLACE),
        )

    return make


@pytest.fixture
def generate():
    """Returns (intake, images) -> the request of a prompt with these images."""

    def accept(intake, *images):
        prompt = {"prompt": PLACE * len(images), "multimodal_data": {"image": list(images)}}
        (request,) = intake.accept(prompt, SamplingParams())
        return request

    return accept


@pytest.fixture
def chat():
    """Returns (intake, URL) -> the request of a conversation with this image_url."""

    def accept(intake, url):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        (request,) = intake.accept(
            {"messages": [{"role": "user", "content": parts}]}, SamplingParams()
        )
        return request

    return accept


@pytest.fixture
def picture():
    """Returns (size, seed) -> an image of noise as PNG."""

    def make(width=56, height=56, seed=0, format="PNG"):
        values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(values).save(buffer, format)
        return buffer.getvalue()

    return make


@pytest.fixture
def serve():
    """path -> body or Location, to a server on this machine: .url and .paths (as asked for)."""
    servers = []

    def start(bodies):
        paths = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                paths.append(self.path)
                body = bodies.get(self.path.partition("?")[0])
                is_redirect = isinstance(body, str)
                self.send_response(404 if body is None else 302 if is_redirect else 200)
                if is_redirect:
                    self.send_header("Location", body)
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body if isinstance(body, bytes) else b"")

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        return SimpleNamespace(url=url, paths=paths)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
