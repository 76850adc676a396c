"""Plugin `logits`: processors that change logits before a token is chosen."""

from mmdeploy_llm.hooks import LogitsProcessorSpec, hookimpl


@hookimpl
def provide_logits_processors() -> list[LogitsProcessorSpec]:
    """Returns FastDeploy's logit bias, and a repetition penalty with a window."""
    return [
        LogitsProcessorSpec(
            name="logit-bias",
            factory=f"{__name__}.processors:LogitBias",
            arguments=("logit_bias",),
            aliases=("LogitBiasLogitsProcessor",),
        ),
        LogitsProcessorSpec(
            name="repetition-window",
            factory=f"{__name__}.processors:RepetitionWindow",
            arguments=("repetition_window", "repetition_window_penalty"),
        ),
    ]
