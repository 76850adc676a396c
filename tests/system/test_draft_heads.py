"""speculative="mtp": the answers of a run without it, and the guesses of the draft layer."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.runner.drafter import Drafter
from mmdeploy_llm.schedule import speculation
from mmdeploy_llm.schedule.pace import Pace

TABLE = [5, 6, 7, 8, 9] * 15
PROMPTS = [TABLE, list(range(20, 60)) * 2, [30, 31, 32, 33], TABLE[:65], [41] * 9]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.3, seed=3, max_tokens=50, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=64, min_tokens=40, logprobs=1),
    SamplingParams(temperature=0, max_tokens=48, stop=["e", "a b"], ignore_eos=True),
    SamplingParams(
        temperature=0.5,
        seed=5,
        max_tokens=40,
        guided_decoding=GuidedDecodingParams(regex="(ab|c){0,12}"),
    ),
]
QWEN = {
    "from": "model.layers.3.",
    "layer": "mtp.layers.0.",
    "embed": "mtp.pre_fc_norm_embedding.",
    "hidden": "mtp.pre_fc_norm_hidden.",
    "norm": "mtp.norm.",
    "proj": "mtp.fc.",
}
ERNIE = {
    "from": "model.layers.0.",
    "layer": "model.mtp_block.0.",
    "embed": "model.mtp_emb_norm.0.",
    "hidden": "model.mtp_hidden_norm.0.",
    "proj": "model.mtp_linear_proj.0.",
}
KEYS = {
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_5": {**QWEN, "from": "model.language_model.layers.3."},
    "qwen3_5_moe": {**QWEN, "from": "model.language_model.layers.3."},
    "ernie4_5": ERNIE,
    "ernie4_5_moe": ERNIE,
    "ernie4_5_vl_moe": ERNIE,
}


def write_head(folder, keys):
    """Adds random tensors of a draft layer to a folder; its layer is like one of the model's."""
    (path,) = folder.glob("*.safetensors")
    tensors, random = load_file(path), torch.Generator().manual_seed(1)
    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["hidden_size"]
    for key in [key for key in tensors if key.startswith(keys["from"])]:
        own = tensors[key]
        noise = torch.randn(own.shape, generator=random) * own.float().std() * 0.3
        tensors[keys["layer"] + key.removeprefix(keys["from"])] = own + noise.to(own.dtype)
    shift = 0.0 if keys is not ERNIE else 1.0  # Qwen's norms add 1 to their weights
    for name in {"embed", "hidden", "norm"} & keys.keys():
        weight = shift + 0.1 * torch.randn(size, generator=random)
        tensors[keys[name] + "weight"] = weight.to(own.dtype)
    proj = torch.randn(size, 2 * size, generator=random) / (2 * size) ** 0.5
    tensors[keys["proj"] + "weight"] = proj.to(own.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tiny_copy, tmp_path_factory):
    """folders(family) -> a tiny checkpoint with a draft layer."""
    known = {}

    def of(family):
        if family not in known:
            folder = tiny_copy(family, tmp_path_factory.mktemp("drafts") / family)
            known[family] = write_head(folder, KEYS[family])
        return known[family]

    return of


def answers(folder, prompts=PROMPTS, params=PARAMS, **options):
    options = {"dtype": "float32", "max_model_len": 512, **options}
    with LLM(str(folder), quiet=True, use_warmup=False, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert [one.error_msg for one in outputs] == [None] * len(outputs)
    found = [
        (one.outputs.token_ids, one.outputs.text, one.outputs.finish_reason, one.outputs.logprobs)
        for one in outputs
    ]
    return found, stats


@pytest.fixture
def always_drafts(monkeypatch):
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 4)
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)


class Knowing:
    """Guesses that are right, all but every third, in place of those of a random draft layer, which
    makes its entries all the same."""

    def __init__(self, monkeypatch, prompts, found):
        real = Drafter._guesses
        texts = {tuple(p): [*p, *one[0]] for p, one in zip(prompts, found, strict=True)}

        def guesses(drafter, items):
            made = real(drafter, items)
            for item in items:
                request = drafter._slots[item.request_id].request
                text = texts[request.token_ids[: request.prompt_len]]
                own = text[item.start + 1 : item.start + 1 + len(item.drafts)]
                if len(own) > 2 and item.start % 3 == 0:
                    own[2] = (own[2] + 1) % 300
                made[item.request_id] = own
            return made

        monkeypatch.setattr(Drafter, "_guesses", guesses)


FORMATS = {
    "float32": {},
    "deterministic": {"dtype": "bfloat16", "deterministic": True},
    "few blocks": {"num_gpu_blocks_override": 20, "block_size": 16},
    "small chunks": {"max_num_batched_tokens": 40},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int4"},
    "no kernels": {"native_kernels": False},
}
QUICK = {("qwen3_5_text", "float32"), ("ernie4_5", "few blocks")}
CASES = [
    pytest.param(family, name, marks=[pytest.mark.full] * ((family, name) not in QUICK))
    for family in ("qwen3_5_text", "ernie4_5")
    for name in FORMATS
    # Qwen3.5 refuses deterministic, and without kernels one step is a tie of 1e-6.
    if (family, name) not in {("qwen3_5_text", "deterministic"), ("qwen3_5_text", "no kernels")}
]


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(("family", "name"), CASES)
def test_answers_are_those_without_drafts(folders, family, name, monkeypatch):
    folder, options = folders(family), FORMATS[name]
    plain, _ = answers(folder, **options)
    Knowing(monkeypatch, PROMPTS, plain)
    drafted, stats = answers(folder, speculative="mtp", **options)
    for one, other in zip(plain, drafted, strict=True):
        assert one[:3] == other[:3]
    assert 50 < stats.num_accepted_drafts < stats.num_drafts


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.full
@pytest.mark.parametrize("family", KEYS)
def test_every_family_with_a_draft_layer(folders, family):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = PROMPTS[1:3]  # without tokens that stand for media
    plain, _ = answers(folders(family), prompts, params)
    drafted, stats = answers(folders(family), prompts, params, speculative="mtp")
    assert [one[0] for one in drafted] == [one[0] for one in plain]
    assert stats.num_drafts > 40


class Oracle:
    """The draft layer in plain torch, after transformers' model of the same folder."""

    def __init__(self, folder, family):
        keys, self.is_ernie = KEYS[family], KEYS[family] is ERNIE
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        (path,) = folder.glob("*.safetensors")
        self.weights = {key: value.float() for key, value in load_file(path).items()}
        self.keys, self.layers = keys, self.model.model.layers
        like = self.layers[int(keys["from"].split(".")[-2])]
        config = self.model.config
        self.layer = type(like)(config, int(keys["from"].split(".")[-2])).eval()
        own = {
            key.removeprefix(keys["layer"]): value
            for key, value in self.weights.items()
            if key.startswith(keys["layer"])
        }
        self.layer.load_state_dict(own)

    def norm(self, x, name):
        x = x * (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        weight = self.weights[self.keys[name] + "weight"]
        return x * (weight if self.is_ernie else 1 + weight)

    @torch.no_grad()
    def run(self, hidden, token_ids):
        """Returns the states of entries 0 .. n of hidden states [n, H] and the next tokens [n]."""
        model = self.model.model
        embeds = self.norm(model.embed_tokens(torch.tensor(token_ids)), "embed")
        x = torch.cat([embeds, self.norm(hidden, "hidden")], -1)
        x = (x @ self.weights[self.keys["proj"] + "weight"].T)[None]
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rope = model.rotary_emb(x, places)
        out = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
        return model.norm(out)[0] if self.is_ernie else self.norm(out, "norm")[0]

    @torch.no_grad()
    def guesses(self, token_ids, count):
        """Returns `count` guesses after token_ids, whose last one is not computed yet."""
        found, text = [], list(token_ids)
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        for _ in range(count):
            last = self.run(hidden, text[1:])[-1]
            found.append(int(self.model.lm_head(last).argmax()))
            text.append(found[-1])
            hidden = torch.cat([hidden, last[None]])
        return found


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ernie4_5", {}),
        pytest.param("ernie4_5", {"native_kernels": False}, marks=pytest.mark.full),
        pytest.param("ernie4_5", {"max_num_batched_tokens": 32}, marks=pytest.mark.full),
        ("qwen3_5_text", {}),
        pytest.param("qwen3_5_text", {"max_num_batched_tokens": 32}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_guesses_are_those_of_the_layer(folders, family, options, monkeypatch):
    """In every step, with other requests beside it, also where earlier guesses were right."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [TABLE, [30, 31, 32, 33], [41] * 9]
    plain, _ = answers(folders(family), prompts, params, **options)
    seen = []
    real = Drafter._guesses

    def noted(drafter, items):
        found = real(drafter, items)
        for item in items:
            slot = drafter._slots[item.request_id].index
            text = drafter._slots.token_ids[slot, : item.start + 1].tolist()
            seen.append((text, list(found[item.request_id])))
        return found

    monkeypatch.setattr(Drafter, "_guesses", noted)
    Knowing(monkeypatch, prompts, plain)
    drafted, _ = answers(folders(family), prompts, params, speculative="mtp", **options)
    assert [one[0] for one in drafted] == [one[0] for one in plain]
    oracle = Oracle(folders(family), family)
    wrong = [
        (len(text), found) for text, found in seen if found != oracle.guesses(text, len(found))
    ]
    assert len(seen) > 10
    assert len(wrong) <= len(seen) // 10, wrong  # ties of rounding


def test_a_layer_that_guesses_wrong_is_soon_left(folders):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    _, stats = answers(folders("ernie4_5"), PROMPTS[:1], params, speculative="mtp")
    assert stats.num_drafts < 60


def test_a_checkpoint_without_draft_layers_is_refused(tiny_folder):
    for family in ("ernie4_5", "qwen3_5_text"):
        with pytest.raises(ConfigError, match="no tensors of draft layers"):
            LLM(str(tiny_folder(family)), speculative="mtp", quiet=True)


def test_a_family_without_draft_layers_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match=r"models such as qwen2 are known, only of ernie4_5, .*"):
        LLM(str(tiny_folder("qwen2")), speculative="mtp", quiet=True)


def test_an_embedding_of_its_own_is_refused(tiny_copy, tmp_path):
    folder = write_head(tiny_copy("qwen3_5_text", tmp_path), QWEN)
    config = json.loads((folder / "config.json").read_text())
    config["mtp_use_dedicated_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mtp_use_dedicated_embeddings"):
        LLM(str(folder), speculative="mtp", quiet=True)
