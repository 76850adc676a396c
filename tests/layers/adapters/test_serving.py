"""Adapters in the engine: each prompt with its own, in one batch, as peft computes them."""

import asyncio
import json
import shutil
import threading

import pytest
import transformers
from safetensors.torch import load_file, save_file

from mmdeploy_llm import (
    LLM,
    AsyncLLM,
    CheckpointError,
    ConfigError,
    EngineConfig,
    LoRARequest,
    RequestError,
)
from mmdeploy_llm.batch.engine import describe_engine
from mmdeploy_llm.cli.options.model import adapter_options
from mmdeploy_llm.testing.tiny import write_tiny

from .lora import GREEDY, answers, tokens_of, write_adapter

PROMPTS = ["the cat", "a red car is", "the quick brown fox jumps over"]
OPTIONS = {"dtype": "float32", "quiet": True, "use_warmup": False, "max_model_len": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    write_tiny("llama", root / "base")
    return root


@pytest.fixture(scope="module")
def oracles(folders):
    """Name of each adapter -> transformers' model with it; "" is the model alone."""
    base = folders / "base"
    return {
        "": transformers.AutoModelForCausalLM.from_pretrained(base).float().eval(),
        "all": write_adapter(base, folders / "all"),
        "some": write_adapter(
            base, folders / "some", seed=2, r=2, target_modules=["q_proj", "down_proj"]
        ),
        "rs": write_adapter(base, folders / "rs", seed=3, use_rslora=True),
    }


@pytest.fixture(scope="module")
def llm(folders, oracles):
    adapters = {name: folders / name for name in oracles if name}
    with LLM(str(folders / "base"), adapters=adapters, **OPTIONS) as llm:
        yield llm


def test_each_prompt_of_a_batch_has_its_adapter(llm, oracles):
    asked = [(text, name) for text in PROMPTS for name in oracles]
    outputs = llm.generate([{"prompt": t, "adapter": n} for t, n in asked], GREEDY, use_tqdm=False)
    expected = [
        tokens_of(oracles[name], output.prompt_token_ids)
        for (_, name), output in zip(asked, outputs, strict=True)
    ]
    assert [list(output.outputs.token_ids) for output in outputs] == expected
    assert len({tuple(own) for own in expected}) > len(PROMPTS)
    alone = [answers(llm, {"prompt": text, "adapter": name})[0] for text, name in asked]
    assert alone == expected


def without(folder, target, *words, zero=""):
    """Copies an adapter without tensors whose names have all words, zeroes those with `zero`."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "adapter_model.safetensors")
    lost = {key for key in tensors if words and all(word in key for word in words)}
    kept = {key: own for key, own in tensors.items() if key not in lost}
    assert (len(kept) < len(tensors)) == bool(words)
    for key, own in kept.items():
        if zero and zero in key:
            own.zero_()
    save_file(kept, target / "adapter_model.safetensors")
    return target


@pytest.mark.parametrize(
    ("name", "words", "count", "missing"),
    [
        ("all", ["layers.1."], 7, "model.layers.1."),  # a whole layer
        ("all", ["layers.0.", "v_proj"], 1, "model.layers.0.self_attn.v_proj"),
        ("all", ["up_proj"], 3, "model.layers.0.mlp.up_proj, "),  # one of its names, everywhere
        ("some", ["layers.0.", "q_proj"], 1, "model.layers.0.self_attn.q_proj"),
    ],
)
def test_modules_that_an_adapter_has_lost_are_told(
    llm, folders, tmp_path, caplog, name, words, count, missing
):
    llm.load_adapter("half", without(folders / name, tmp_path / "half", *words))
    assert answers(llm, {"prompt": PROMPTS[0], "adapter": "half"})
    llm.unload_adapter("half")
    (told,) = (each.message for each in caplog.records if "no tensors for" in each.message)
    assert f"for {count} modules that its config names, such as " in told
    assert missing in told


@pytest.mark.parametrize("zero", ["lora_A", "lora_B"])
def test_an_adapter_without_effect_is_told(llm, oracles, folders, tmp_path, caplog, zero):
    llm.load_adapter("zero", without(folders / "all", tmp_path / "zero", zero=zero))
    prompts = [{"prompt": PROMPTS[0], "adapter": "zero"}, {"prompt": PROMPTS[0]}]
    one, other = answers(llm, prompts)
    llm.unload_adapter("zero")
    assert one == other
    (told,) = (each.message for each in caplog.records if "changes nothing" in each.message)
    assert "all that it adds is zero" in told


def test_whole_adapters_are_not_told_of(llm, folders, tmp_path, caplog):
    for number, name in enumerate(("all", "some", "rs")):
        llm.load_adapter("whole", folders / name)
        assert answers(llm, {"prompt": PROMPTS[number], "adapter": "whole"})
        llm.unload_adapter("whole")
    write_adapter(folders / "base", tmp_path / "one", layers_to_transform=[1])
    llm.load_adapter("one", tmp_path / "one")
    assert answers(llm, {"prompt": PROMPTS[0], "adapter": "one"})
    llm.unload_adapter("one")
    assert [each.message for each in caplog.records if "adapter" in each.message] == []


def test_a_prefix_is_that_of_its_adapter(llm, oracles):
    prompt = list(range(5, 5 + 2 * llm.runtime.block_size))
    for name in ("all", "", "all"):
        (output,) = llm.generate(
            {"prompt_token_ids": prompt, "adapter": name}, GREEDY, use_tqdm=False
        )
        assert list(output.outputs.token_ids) == tokens_of(oracles[name], prompt)
    assert output.num_cached_tokens > 0


def test_every_door_names_an_adapter(llm, oracles, folders):
    (output,) = llm.generate("the cat", GREEDY, use_tqdm=False, adapter="all")
    expected = tokens_of(oracles["all"], output.prompt_token_ids)
    assert list(output.outputs.token_ids) == expected
    request = LoRARequest("all", 1, str(folders / "all"))
    given = {"use_tqdm": False, "sampling_params": GREEDY}
    for outputs in (
        llm.generate("the cat", lora_request=request, **given),
        llm.generate("the cat", lora_request=[request], **given),
        llm.generate("the cat", lora_name="all", **given),
        llm.generate({"prompt": "the cat", "adapter": "all"}, adapter="some", **given),
        list(llm.generate_iter([{"prompt": "the cat", "adapter": "all"}], GREEDY)),
    ):
        assert list(outputs[0].outputs.token_ids) == expected
    streamed = llm.stream("the cat", GREEDY, adapter="all")
    assert [token for delta in streamed for token in delta.outputs.token_ids] == expected
    both = llm.generate(["the cat", "the cat"], adapter=["all", None], **given)
    plain = tokens_of(oracles[""], output.prompt_token_ids)
    assert [list(one.outputs.token_ids) for one in both] == [expected, plain]


def test_the_event_loop_goes_on_while_an_adapter_is_read(folders, oracles, monkeypatch):
    """And requests that bring the same files have them read once."""
    loads, read, goes_on = [], AsyncLLM.load_adapter, threading.Event()

    def slow(self, name, folder):
        loads.append((name, threading.current_thread() is threading.main_thread()))
        assert goes_on.wait(60)
        return read(self, name, folder)

    monkeypatch.setattr(AsyncLLM, "load_adapter", slow)

    async def answer(engine, request):
        return [output async for output in engine.generate("a cat", GREEDY, adapter=request)][-1]

    async def run():
        request = LoRARequest("brought", 1, str(folders / "all"))
        async with AsyncLLM(str(folders / "base"), **OPTIONS) as engine:
            both = [asyncio.create_task(answer(engine, request)) for _ in range(2)]
            while not loads:
                await asyncio.sleep(0.01)
            goes_on.set()
            return await asyncio.gather(*both)

    first, second = asyncio.run(run())
    assert loads == [("brought", False)]
    expected = tokens_of(oracles["all"], first.prompt_token_ids)
    assert [list(own.outputs.token_ids) for own in (first, second)] == [expected, expected]


def test_wrong_calls_raise(llm):
    with pytest.raises(ValueError, match="2 prompts and 1 adapters"):
        llm.generate(["a", "b"], adapter=["all"])
    with pytest.raises(TypeError, match="adapter must be the name of an adapter"):
        llm.generate("a", adapter=3)
    with pytest.raises(TypeError, match="lora_request and adapter; give one"):
        llm.generate("a", adapter="all", lora_request=LoRARequest("some"))


def test_an_unknown_adapter_is_the_error_of_its_prompt(llm):
    asked = [{"prompt": "a", "adapter": "al"}, {"prompt": "a", "adapter": 3}, "a"]
    one, two, three = llm.generate(asked, GREEDY, use_tqdm=False)
    assert one.error_code == two.error_code == 400
    assert one.error_msg == (
        "there is no adapter 'al'; did you mean 'all'? known: all, some, rs; load one with "
        "llm.load_adapter(name, folder)"
    )
    assert "adapter must be the name of an adapter, got 3" in two.error_msg
    assert three.is_ok


def test_the_engine_knows_its_adapters(llm, folders):
    assert list(llm.adapters) == ["all", "some", "rs"]
    ref = llm.adapters["all"]
    assert (ref.rank, ref.folder, ref.has_media) == (4, str(folders / "all"), False)
    tensors = load_file(folders / "all/adapter_model.safetensors").values()
    assert ref.num_bytes >= sum(own.numel() for own in tensors) * 4


@pytest.mark.full
def test_adapters_come_and_go_while_prompts_are_computed(folders, oracles):
    with LLM(str(folders / "base"), **OPTIONS) as llm:
        prompt = list(range(5, 40))
        stream = llm.stream(prompt, GREEDY)
        next(stream)
        llm.load_adapter("mine", folders / "all")
        ask = {"prompt_token_ids": prompt, "adapter": "mine"}
        assert answers(llm, ask) == [tokens_of(oracles["all"], prompt)]
        llm.load_adapter("mine", folders / "rs")  # the same name, other files
        assert answers(llm, ask) == [tokens_of(oracles["rs"], prompt)]
        held = llm.stream(prompt, GREEDY.replace(max_tokens=60), adapter="mine")
        with pytest.raises(RequestError, match="adapter 'mine' is in use by 1 prompts"):
            llm.unload_adapter("mine")
        held.close()
        list(stream)
        llm.generate("a", GREEDY, use_tqdm=False)  # the aborted one has left
        llm.unload_lora("mine")
        assert llm.adapters == {}
        (output,) = llm.generate(ask, GREEDY, use_tqdm=False)
        assert "there is no adapter 'mine'; known: none is loaded" in output.error_msg
        with pytest.raises(RequestError, match="there is no adapter 'mine'"):
            llm.unload_adapter("mine")
        llm.load_lora("mine", str(folders / "all"))
        llm.restart()
        assert answers(llm, ask) == [tokens_of(oracles["all"], prompt)]


@pytest.mark.full
def test_more_adapters_than_memory_has_take_turns(folders, oracles):
    adapters = {name: folders / name for name in oracles if name}
    with LLM(str(folders / "base"), adapters=adapters, max_adapters=1, **OPTIONS) as llm:
        asked = [{"prompt": "the cat", "adapter": name} for name in [*oracles] * 3]
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        for ask, output in zip(asked, outputs, strict=True):
            expected = tokens_of(oracles[ask["adapter"]], output.prompt_token_ids)
            assert list(output.outputs.token_ids) == expected
        assert len(llm._desk.engine._runner._adapters._slots) == 1


def test_the_memory_of_adapters_is_bounded(folders, oracles):
    size = {"adapter_memory": 13000, "max_adapter_rank": 3}
    with LLM(str(folders / "base"), **size, **OPTIONS) as llm:
        with pytest.raises((ConfigError, CheckpointError), match="rank 4"):
            llm.load_adapter("all", folders / "all")
        assert llm.load_adapter("some", folders / "some").num_bytes <= 13000
    with (
        pytest.raises(ConfigError, match=r"adapter 'all' takes \d+ bytes, and adapter_memory is"),
        LLM(
            str(folders / "base"),
            adapters={"all": folders / "all"},
            adapter_memory=13000,
            **OPTIONS,
        ),
    ):
        pass


def test_an_adapter_of_another_model_is_refused_by_name(llm, folders, tmp_path):
    def broken(change):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders / "all", folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file(change(tensors), folder / "adapter_model.safetensors")
        return folder

    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    narrow = broken(lambda own: {**own, name: own[name][:, 1:].contiguous()})
    with pytest.raises(
        CheckpointError,
        match=r"model.layers.0.self_attn.q_proj': lora_A has shape \[4, 63\], but this model needs "
        r"\[4, 64\]",
    ):
        llm.load_adapter("other", narrow)
    deep = broken(lambda own: {key.replace("layers.1.", "layers.7."): x for key, x in own.items()})
    with pytest.raises(CheckpointError, match=r"'model.layers.7.*': this model has no such module"):
        llm.load_adapter("other", deep)
    with pytest.raises(CheckpointError, match=r"there is no adapter '\./none': no such folder"):
        llm.load_adapter("other", "./none")
    with pytest.raises(ConfigError, match="the name of an adapter must be a text"):
        llm.load_adapter("", folders / "all")
    assert "other" not in llm.adapters


def test_files_that_change_after_they_were_loaded_fail_their_prompts_alone(llm, folders, tmp_path):
    shutil.copytree(folders / "all", tmp_path / "own")
    llm.load_adapter("changing", tmp_path / "own")
    config = tmp_path / "own/adapter_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "lora_alpha": 1}))
    asked = [{"prompt": "the cat", "adapter": "changing"}, "the cat"]
    one, two = llm.generate(asked, GREEDY, use_tqdm=False)
    assert one.error_code == 500
    assert "the files of adapter 'changing' in" in one.error_msg
    assert two.is_ok
    config.write_text(before)
    (again,) = llm.generate(asked[:1], GREEDY, use_tqdm=False)
    assert again.is_ok
    llm.unload_adapter("changing")


def test_the_default_is_that_of_prompts_that_name_none(folders, oracles):
    adapters = [f"all={folders / 'all'}", f"some={folders / 'some'}"]
    options = {**OPTIONS, "adapters": adapters, "default_adapter": "some"}
    with LLM(str(folders / "base"), **options) as llm:
        asked = ["the cat", {"prompt": "the cat", "adapter": ""}]
        one, two = llm.generate(asked, GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="'some' is the default adapter"):
            llm.unload_adapter("some")
    ids = one.prompt_token_ids
    assert list(one.outputs.token_ids) == tokens_of(oracles["some"], ids)
    assert list(two.outputs.token_ids) == tokens_of(oracles[""], ids)
    with pytest.raises(ConfigError, match=r"default_adapter is 'al', which is not among adapters"):
        EngineConfig(model="m", adapters=adapters, default_adapter="al")
    for wrong, reason in ((["a=1", "a=2"], "gives a name twice"), ({"": "x"}, "give a name and")):
        with pytest.raises(ConfigError, match=reason):
            EngineConfig(model="m", adapters=wrong)


def test_a_batch_names_adapters_and_is_resumed_with_the_same(llm, oracles, folders, tmp_path):
    lines = [{"id": str(n), "prompt": "the cat", "adapter": n} for n in oracles if n]
    output = tmp_path / "out.jsonl"
    summary = llm.run_batch(lines, output, sampling_params=GREEDY, use_tqdm=False)
    assert summary.num_failed == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    expected = {n: answers(llm, {"prompt": "the cat", "adapter": n}) for n in oracles if n}
    texts = {record["id"]: record["text"] for record in records}
    assert len(set(texts.values())) == len(expected)
    config = llm._config.model_copy(update={"adapters": {"all": str(folders / "rs")}})
    one, two = describe_engine(llm._config), describe_engine(config)
    assert {"adapters.all", "adapters.some", "adapters.rs"} <= one.values.keys()
    assert two.values["adapters.all"] == one.values["adapters.rs"]
    assert "max_adapters" not in one.values


def test_a_batch_is_not_resumed_with_other_files_of_its_adapter(llm, folders, tmp_path):
    lines = [{"id": "1", "prompt": "the cat", "adapter": "mine"}]
    output, given = tmp_path / "out.jsonl", {"sampling_params": GREEDY, "use_tqdm": False}
    llm.load_adapter("mine", folders / "all")
    llm.run_batch(lines, output, **given)
    before = output.read_bytes()
    llm.load_adapter("mine", folders / "rs")
    more = [*lines, {"id": "2", "prompt": "a red", "adapter": "mine"}]
    with pytest.raises(ConfigError, match=r"another configuration: adapters\.mine is '.*', was '"):
        llm.run_batch(more, output, resume=True, **given)
    assert output.read_bytes() == before
    llm.load_adapter("mine", folders / "all")
    assert llm.run_batch(more, output, resume=True, **given).num_failed == 0
    assert len(output.read_bytes().splitlines()) == 2
    llm.unload_adapter("mine")


def test_the_command_takes_adapters():
    one = adapter_options(["sql=adapters/sql"])
    assert one == {"adapters": ["sql=adapters/sql"], "default_adapter": "sql"}
    two = ["a=x", "b=y"]
    assert adapter_options(two) == {"adapters": two}
    assert adapter_options([*two, "b"]) == {"adapters": two, "default_adapter": "b"}
    assert adapter_options([]) == {}
    with pytest.raises(ConfigError, match="--adapter a and b: one of them"):
        adapter_options(["a", "b"])


@pytest.mark.full
@pytest.mark.parametrize("form", ["tensor_parallel_size", "data_parallel_size"])
def test_engines_in_other_processes_have_adapters(folders, oracles, form, monkeypatch):
    prompt = list(range(5, 25))
    with LLM(
        str(folders / "base"), adapters={"all": folders / "all"}, **OPTIONS, **{form: 2}
    ) as llm:
        llm.load_adapter("rs", folders / "rs")
        asked = [{"prompt_token_ids": prompt, "adapter": name} for name in ("all", "", "rs")]
        assert answers(llm, asked) == [tokens_of(oracles[a["adapter"]], prompt) for a in asked]
        assert list(llm.adapters) == ["all", "rs"]
        llm.unload_adapter("rs")
        (output,) = llm.generate(asked[2:], GREEDY, use_tqdm=False)
        assert "there is no adapter 'rs'" in output.error_msg
        with pytest.raises(CheckpointError, match="no such folder"):
            llm.load_adapter("other", "./none")
        if form == "data_parallel_size":  # the second engine refuses
            monkeypatch.setattr(llm._desk.desks[1], "load_adapter", refuse)
            for name in ("all", "half"):
                with pytest.raises(CheckpointError, match="no room"):
                    llm.load_adapter(name, folders / "rs")
            assert {name: ref.folder for name, ref in llm.adapters.items()} == {
                "all": str(folders / "all")
            }


def refuse(name, source):
    raise CheckpointError("no room")


KINDS = {
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "tokens": {"trainable_token_indices": [5, 6, 9]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_every_kind_is_computed_as_peft_does(folders, llm):
    prompts = [list(range(5, 25)), [7, 8, 9]]
    models = {
        kind: write_adapter(folders / "base", folders / kind, seed=9, **options)
        for kind, options in KINDS.items()
    }
    for kind in KINDS:
        llm.load_adapter(kind, folders / kind)
    asked = [{"prompt_token_ids": own, "adapter": kind} for own in prompts for kind in KINDS]
    expected = [tokens_of(models[ask["adapter"]], ask["prompt_token_ids"]) for ask in asked]
    assert answers(llm, asked) == expected
    for kind in KINDS:
        llm.unload_adapter(kind)
