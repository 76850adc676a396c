"""The built-in logits processors keep the contract and compute what their docstrings say."""

from mmdeploy_llm_plugins.logits import provide_logits_processors

from mmdeploy_llm.testing import LogitsExample, LogitsProcessorConformance, PluginConformance

LOGIT_BIAS, WINDOW = provide_logits_processors()


class TestPlugin(PluginConformance):
    plugin = "mmdeploy_llm_plugins.logits"


class TestLogitBias(LogitsProcessorConformance):
    spec = LOGIT_BIAS
    arguments = (
        {"logit_bias": {3: 1.5, 299: -2}},
        {"logit_bias": {"7": 1e308}},
        {"logit_bias": {}},
    )
    wrong_arguments = (
        {},
        {"logit_bias": [3]},
        {"logit_bias": {300: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"word": 1.0}},
        {"logit_bias": {3: "1"}},
        {"logit_bias": {3: float("nan")}},
    )
    examples = (
        LogitsExample(
            arguments={"logit_bias": {"0": 2, 2: -1.5}},
            logits=(1.0, 1.0, 1.0),
            expected=(3.0, 1.0, -0.5),
        ),
    )


class TestRepetitionWindow(LogitsProcessorConformance):
    spec = WINDOW
    arguments = ({}, {"repetition_window": 2}, {"repetition_window_penalty": 0.5})
    wrong_arguments = (
        {"repetition_window": 0},
        {"repetition_window": 2.5},
        {"repetition_window_penalty": 0},
        {"repetition_window_penalty": "2"},
    )
    examples = (
        LogitsExample(
            arguments={"repetition_window": 3, "repetition_window_penalty": 2},
            prompt_token_ids=(2,),
            output_token_ids=(3, 0, 1, 0),
            logits=(1.0, -1.0, 1.0, 1.0),
            expected=(0.5, -2.0, 1.0, 1.0),
        ),
    )
