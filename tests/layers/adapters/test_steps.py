"""Adapters in the steps of an engine: recorded ones, interrupted ones, those of a deterministic
engine."""

from collections import Counter

import pytest
import transformers

from mmdeploy_llm import LLM, ConfigError, SamplingParams
from mmdeploy_llm.kernels.cpu import load
from mmdeploy_llm.layers.basic.recordings import Recordings
from mmdeploy_llm.testing.tiny import write_tiny
from tests.together import begin_together

from .lora import answers, tokens_of, write_adapter

OPTIONS = {"dtype": "float32", "quiet": True, "use_warmup": False, "max_model_len": 256}
LONG = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
CHANGES = {
    "all": {},
    "attention": {"seed": 2, "r": 2, "target_modules": ["q_proj", "v_proj"]},
    "mlp": {"seed": 3, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "dora": {"seed": 4, "use_dora": True},
    "saved": {"seed": 5, "modules_to_save": ["lm_head"]},
}
needs_kernels = pytest.mark.skipif(load() is None, reason="needs the C++ kernels")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    write_tiny("llama", root / "base")
    return root


@pytest.fixture(scope="module")
def oracles(root):
    """Name of each adapter -> peft's model with it; "" is the model alone."""
    base = root / "base"
    made = {name: write_adapter(base, root / name, **options) for name, options in CHANGES.items()}
    return {"": transformers.AutoModelForCausalLM.from_pretrained(base).float().eval(), **made}


def asks_of(names):
    """A prompt for each, all of another length."""
    return [
        {"prompt_token_ids": list(range(5 + at, 30)), "adapter": name}
        for at, name in enumerate(names)
    ]


def expected_of(oracles, names, count=LONG.max_tokens):
    return [
        tokens_of(oracles[ask["adapter"]], ask["prompt_token_ids"], count) for ask in asks_of(names)
    ]


@pytest.fixture
def counts(monkeypatch):
    """Counts the passes that were replayed."""
    found = Counter()
    run = Recordings.run

    def counting(self, inputs, kernels, compute):
        before = {id(own) for own in self.values()}
        out = run(self, inputs, kernels, compute)
        assert None not in self.values(), "a step could not be recorded"
        found["replayed"] += {id(own) for own in self.values()} <= before
        return out

    monkeypatch.setattr(Recordings, "run", counting)
    return found


@needs_kernels
@pytest.mark.full
def test_recorded_steps_have_the_adapters_of_their_rows(root, oracles, counts):
    """Adapters change between steps of one recording: which rows have which, which matrices they
    change, and which are in memory."""
    adapters = {name: root / name for name in ("attention", "mlp")}
    with LLM(str(root / "base"), adapters=adapters, max_adapters=2, **OPTIONS) as llm:

        def check(*names):
            before = counts["replayed"]
            assert answers(llm, asks_of(names), LONG) == expected_of(oracles, names)
            assert counts["replayed"] - before > 10

        check("attention", "", "attention", "")
        check("mlp", "", "attention", "")  # more matrices are changed
        check("attention", "mlp", "", "")
        check("", "", "", "mlp")
        check("mlp", "mlp", "mlp", "mlp")
        check("", "", "", "")
        llm.load_adapter("all", root / "all")  # takes the slot of "attention"
        check("all", "mlp", "", "")  # more matrices once more
        llm.unload_adapter("mlp")
        llm.load_adapter("dora", root / "dora")
        check("all", "dora", "", "dora")
        check("attention", "", "dora", "")


@needs_kernels
@pytest.mark.full
def test_recorded_steps_of_experts_have_the_adapters_of_their_rows(tmp_path, counts):
    """One adapter changes experts' own matrices, the other attention and the router."""
    write_tiny("qwen3_moe", tmp_path / "base")
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    made = {
        "experts": {"target_modules": ["q_proj"], "target_parameters": stacks},
        "router": {"seed": 2, "target_modules": ["v_proj"], "target_parameters": ["gate.weight"]},
    }
    own = {
        name: write_adapter(tmp_path / "base", tmp_path / name, **given)
        for name, given in made.items()
    }
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float().eval()
    with LLM(
        str(tmp_path / "base"), adapters={name: tmp_path / name for name in made}, **OPTIONS
    ) as llm:
        for names in (("router", ""), ("experts", "router", "", "experts"), ("", "")):
            before = counts["replayed"]
            expected = expected_of({"": base, **own}, names)
            assert answers(llm, asks_of(names), LONG) == expected
            assert counts["replayed"] - before > 10


@pytest.mark.full
def test_interrupted_requests_keep_their_adapters(root, oracles):
    names = [*oracles] * 2
    adapters = {name: root / name for name in CHANGES}
    long = LONG.replace(max_tokens=40)
    tight = {"num_gpu_blocks_override": 12, "block_size": 16, "max_adapters": 3}
    with LLM(str(root / "base"), adapters=adapters, **tight, **OPTIONS) as llm:
        begin_together(llm, len(names))
        assert answers(llm, asks_of(names), long) == expected_of(oracles, names, 40)
        assert llm._desk.engine._scheduler.stats().num_preemptions > 0


@needs_kernels
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_engine_has_the_same_bits_in_any_company(root, oracles, dtype):
    adapters = {name: root / name for name in CHANGES if name != "saved"}
    options = {**OPTIONS, "deterministic": True, "dtype": dtype, "max_adapters": 4}
    params = LONG.replace(logprobs=1)
    with LLM(str(root / "base"), adapters=adapters, **options) as llm:

        def bits(asks):
            outputs = llm.generate(asks, params, use_tqdm=False)
            return [(own.outputs.token_ids, own.outputs.logprobs) for own in outputs]

        asks = asks_of(["", *adapters] * 3)
        assert [bits([ask])[0] for ask in asks] == bits(asks)


@needs_kernels
def test_a_deterministic_engine_refuses_what_torch_computes(root, oracles):
    with LLM(str(root / "base"), deterministic=True, **OPTIONS) as llm:
        with pytest.raises(
            ConfigError,
            match=r"deterministic = True cannot be kept with adapter 'saved': torch computes what "
            "it changes of lm_head, in an order .*; merge it into the model",
        ):
            llm.load_adapter("saved", root / "saved")
        assert not llm.adapters
        llm.load_adapter("dora", root / "dora")
