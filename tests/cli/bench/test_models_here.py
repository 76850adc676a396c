"""A benchmark whose model is nowhere says so in one line, and what to do."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "benchmarks"

RUN = ["run"]
SCRIPTS = {  # with the words before the model
    "adapters": [],
    "cores": [],
    "draft_head": ["--model"],
    "experts_budget": RUN,
    "kv_cache": [],
    "load": [],
    "memory_budget": RUN,
    "quantization_quality": [],
    "speculation": [],
    "step_overhead": ["--model"],
    "text": [],
}


@pytest.mark.full  # they import transformers' models
def test_a_model_that_is_nowhere(load_benchmark, monkeypatch, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, words in SCRIPTS.items():
        main = load_benchmark(name).main
        for given in (tmp_path / "none", "models/none", empty):
            monkeypatch.setattr(sys, "argv", [name, *words, str(given)])
            with pytest.raises(SystemExit) as ended:
                main()
            *_, last = capsys.readouterr().err.splitlines()
            assert ended.value.code == 2, name
            assert str(given) in last, name
            assert " writes " in last, name


def test_products_says_what_runs_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["products.py"])
    with pytest.raises(SystemExit, match=r"run kernels\.py"):
        runpy.run_path(str(FOLDER / "products.py"), run_name="__main__")
