"""The lines of docs/install.md bring the CPU build of torch: pip and uv resolve them against an
index on 127.0.0.1, which has the metadata of what is installed here and no packages."""

import html
import http.server
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "examples/caption_folder.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA, CPU = "2.13.0", "2.13.0+cpu"
LINES = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
OF_PIP = [line for line in LINES if CPU_INDEX in line]
OF_UV = [line for line in LINES if "--torch-backend" in line]


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as an index of packages does, without their files, and refuses to be a proxy."""

    def do_GET(self):
        _, index, name, *file = self.path.split("/")
        texts = self.server.texts.get((index, name), {})
        if file[0]:
            body = texts.get(file[0].replace("%2B", "+").removesuffix(".metadata"))
        else:
            links = (
                f'<a href="{html.escape(each.replace("+", "%2B"))}" data-core-metadata="true" '
                f'data-dist-info-metadata="true">{each}</a>'
                for each in texts
            )
            body = (
                "<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>" if texts else None
            )
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((body or "").encode())

    def do_CONNECT(self):
        self.server.asked.add(self.path)
        self.send_error(403)

    def log_message(self, *_):
        """Nobody reads it."""


@pytest.fixture(scope="module")
def index():
    """A server with two indexes, `default` and `cpu`. asked: hosts that it was to connect to."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked, server.texts = set(), {}
    for dist in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", dist.name).lower()
        text = dist.read_text("METADATA") or dist.read_text("PKG-INFO")
        file = f"{name.replace('-', '_')}-{dist.version}-py3-none-any.whl"
        server.texts["default", name] = {file: text}
    (text,) = server.texts["default", "torch"].values()
    for which, version in (("default", CUDA), ("cpu", CPU)):
        own = re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)
        server.texts[which, "torch"] = {f"torch-{version}-py3-none-any.whl": own}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url(index, name):
    return f"http://127.0.0.1:{index.server_port}/{name}"


def bare_environment(tmp_path, **more):
    """The environment without what somebody has set for pip and uv."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(("PIP_", "UV_"))}
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
    return {**kept, **nowhere, "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "uv"), **more}


def resolved_by_pip(index, words, tmp_path):
    """Name -> version of all that pip would install."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", *words, "--dry-run", "--ignore-installed"]
    command += ["--report", str(report), "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    if "--index-url" not in words:
        command += ["--index-url", url(index, "default")]
    environment = bare_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


def words_for_pip(line):
    """The arguments of pip in a line for pip or pipx."""
    program, verb, *words = shlex.split(line)
    assert verb == "install"
    if program == "pipx":
        words = [part for word in words for part in word.removeprefix("--pip-args=").split(" ")]
    return words


@pytest.mark.full
@pytest.mark.parametrize("line", OF_PIP)
def test_pip_takes_the_cpu_build(line, index, tmp_path):
    words = [word.replace(CPU_INDEX, url(index, "cpu")) for word in words_for_pip(line)]
    if "--index-url" in words:
        words.append("--no-deps")  # PyTorch's index has what torch needs, this one has torch alone
    assert resolved_by_pip(index, words, tmp_path)["torch"] == CPU


@pytest.mark.full
def test_without_the_lines_pip_takes_the_other_one(index, tmp_path):
    found = resolved_by_pip(index, ["mmdeploy-llm"], tmp_path)
    assert found["torch"] == CUDA
    assert found["mmdeploy-llm"] == metadata.version("mmdeploy-llm")
    assert "transformers" in found


def run_uv(index, words, tmp_path):
    """Runs uv, which reaches nothing but the server."""
    uv = Path(pytest.importorskip("uv").find_uv_bin())
    index.asked.clear()
    only = {"HTTPS_PROXY": url(index, ""), "UV_DEFAULT_INDEX": url(index, "default")}
    environment = bare_environment(tmp_path, **only, UV_HTTP_RETRIES="0", UV_PYTHON=sys.executable)
    command = [str(uv.with_name(words[0])), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)


@pytest.mark.full
@pytest.mark.parametrize("line", OF_UV)
def test_uv_asks_the_index_of_cpu_builds_for_torch(line, index, tmp_path):
    words = shlex.split(line)
    if words[:3] == ["uv", "pip", "install"]:
        words += ["--target", str(tmp_path / "elsewhere")]  # here everything is installed
    done = run_uv(index, words, tmp_path)
    assert done.returncode != 0
    assert index.asked == {"download.pytorch.org:443"}, done.stderr
    assert f"{CPU_INDEX}/torch/" in done.stderr


def script_metadata(text):
    """The metadata of a script, see PEP 723."""
    (block,) = re.findall(r"(?m)^# /// script\n((?:#(?: .*)?\n)+)# ///$", text)
    return tomllib.loads(re.sub(r"(?m)^# ?", "", block))


def test_the_script_needs_what_the_project_and_the_page_say():
    found = script_metadata(SCRIPT.read_text(encoding="utf-8"))
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert found["requires-python"] == project["requires-python"]
    assert found["dependencies"] == tomllib.loads(block)["project"]["dependencies"]
    assert found["dependencies"] == [project["name"], "torch"]
    assert "torch" in {Requirement(each).name for each in project["dependencies"]}
    assert found["tool"] == tomllib.loads(block)["tool"]
    assert found["tool"]["uv"]["index"][0]["url"] == CPU_INDEX
    versions = next(each for each in project["dependencies"] if each.startswith("torch"))
    assert f'"{versions}"' in PAGE


@pytest.mark.full
def test_uv_resolves_the_script_to_the_cpu_build(index, tmp_path):
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text().replace(CPU_INDEX, url(index, "cpu")))
    done = run_uv(index, ["uv", "sync", "--script", str(script), "--dry-run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f" + torch=={CPU}\n" in done.stderr, done.stderr
    assert not index.asked


@pytest.mark.full
def test_the_script_captions_a_folder(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    shutil.copy(ROOT / "examples/images/picture-5.png", folder)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time nothing is left
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "photos"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "captions.jsonl: 1 captions, 0 failed"
    assert second == "captions.jsonl: 0 captions, 0 failed"
    (line,) = (tmp_path / "captions.jsonl").read_text().splitlines()
    assert json.loads(line)["text"]


@pytest.mark.long
def test_uv_runs_the_script_in_an_environment_of_its_own(tmp_path):
    """torch is the build that is installed here, where pip finds it again, else that of PyTorch's
    index; the rest comes from the index that uv uses."""
    uv = pytest.importorskip("uv").find_uv_bin()
    pip, built = [sys.executable, "-m", "pip"], str(tmp_path / "built")
    environment = {**os.environ, "MMDEPLOY_LLM_PURE": "1"}
    words = ["wheel", "--no-deps", "--no-build-isolation", "-w", built, str(ROOT)]
    subprocess.run([*pip, *words], env=environment, check=True)
    script, text = tmp_path / SCRIPT.name, SCRIPT.read_text()
    wanted = f"torch=={metadata.version('torch')}"
    if subprocess.run([*pip, "download", "--no-deps", "-d", built, wanted]).returncode == 0:
        head, _, rest = text.partition("#\n# [[tool")
        text = head + rest[rest.index("# ///") :]
        text = text.replace('"torch"]', f'"{wanted}"]')
    script.write_text(text)
    words = [uv, "run", "--no-project", "--python", sys.executable, "--find-links", built]
    words += [str(script), str(ROOT / "examples/images"), "--output", str(tmp_path / "out.jsonl")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("12 captions, 1 failed\n")
