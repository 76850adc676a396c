"""Examples of the arguments of every hook that provides no specs."""

from __future__ import annotations

from typing import Any

import typer

from mmdeploy_llm.hooks import EngineInfo, MediaLimits, MediaRef, RequestRecord, StepStats
from mmdeploy_llm.values.outputs.request_output import RequestMetrics


def example_arguments() -> dict[str, dict[str, Any]]:
    """Returns hook -> name of each argument -> an example."""
    info = EngineInfo(
        model="folder",
        architecture="ExampleForCausalLM",
        device="cpu",
        dtype="float32",
        num_blocks=8,
        block_size=16,
        max_num_seqs=4,
        max_model_len=128,
    )
    stats = StepStats(
        step_id=1,
        num_scheduled_tokens=5,
        num_scheduled_requests=1,
        num_sampled_tokens=1,
        num_encoded_media=0,
        num_running=1,
        num_waiting=0,
        num_free_blocks=7,
        num_preemptions=0,
        plan_time=0.001,
        run_time=0.01,
        deliver_time=0.001,
    )
    record = RequestRecord(
        request_id="1",
        finish_reason="stop",
        error_code=200,
        num_prompt_tokens=5,
        num_output_tokens=1,
        num_cached_tokens=0,
        num_media_tokens={},
        metrics=RequestMetrics(arrival_time=0.0),
    )
    ref = MediaRef(kind="image", uri="conformance-check://nothing/here")
    return {
        "fetch_media": {"ref": ref, "limits": MediaLimits()},
        "on_engine_start": {"info": info},
        "on_step": {"stats": stats},
        "on_request_finished": {"record": record},
        "on_engine_stop": {"info": info},
        "extend_cli": {"app": typer.Typer()},
    }
