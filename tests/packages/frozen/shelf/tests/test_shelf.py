import pytest
from mmdeploy_llm.testing import FetcherConformance, OutputSinkConformance, PluginConformance
from shelf_llm import provide_output_sinks

NOTE = b"a note\n"


class TestPlugin(PluginConformance):
    plugin = "shelf_llm"


class TestSink(OutputSinkConformance):
    spec = provide_output_sinks()[0]


class TestFetcher(FetcherConformance):
    plugin = "shelf_llm"
    serves = {"shelf://note.txt": NOTE}

    @pytest.fixture(autouse=True)
    def store(self, tmp_path, monkeypatch):
        (tmp_path / "note.txt").write_bytes(NOTE)
        monkeypatch.setenv("SHELF_FOLDER", str(tmp_path))
