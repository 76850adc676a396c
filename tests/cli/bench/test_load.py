"""load.py measures the start of a process."""

import pytest


@pytest.mark.full
def test_a_start_is_measured(load_benchmark, tmp_path):
    """Its program names functions of the engine, which no checker of types sees."""
    measure = load_benchmark("load").measure
    for options in ({"weight_cache": False}, {"weight_cache": str(tmp_path)}):
        found = measure("shapes-vl", options)
        assert 0 < found["weights"] < found["LLM()"] < found["first token"]
