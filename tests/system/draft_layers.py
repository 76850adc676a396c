"""Tiny checkpoints with draft layers, what answers they give, and what their layers guess in plain
torch."""

import json
import re

import torch
import transformers
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams
from mmdeploy_llm.engine.runner.drafter import Drafter

TABLE = [5, 6, 7, 8, 9] * 15
PROMPTS = [TABLE, list(range(40, 80)) * 2, [36, 37, 38, 39], TABLE[:65], [41] * 9]
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


def one_more_layer(decoder):
    """Returns the keys of a draft layer after the last one of three. decoder: the prefix of its
    tensors."""
    layer = decoder + "layers.3."
    return {
        "from": decoder + "layers.2.",
        "layer": layer,
        "embed": layer + "enorm.",
        "hidden": layer + "hnorm.",
        "norm": layer + "shared_head.norm.",
        "proj": layer + "eh_proj.",
        # Copies of the model's, which are not read.
        "copies": {"embed_tokens.": decoder + "embed_tokens.", "shared_head.head.": "lm_head."},
    }


GLM = one_more_layer("model.language_model.")
DEEPSEEK = one_more_layer("model.")
KEYS = {
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_5": {**QWEN, "from": "model.language_model.layers.3."},
    "qwen3_5_moe": {**QWEN, "from": "model.language_model.layers.3."},
    "ernie4_5": ERNIE,
    "ernie4_5_moe": ERNIE,
    "ernie4_5_vl_moe": ERNIE,
    "glm4_moe": DEEPSEEK,
    "glm4v_moe": GLM,
    "glm_ocr": GLM,
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
    for copy, original in keys.get("copies", {}).items():
        tensors[f"{keys['layer']}{copy}weight"] = tensors[original + "weight"].clone()
    shift = 0.0 if keys["proj"] == QWEN["proj"] else 1.0  # Qwen's norms add 1 to their weights
    for name in sorted({"embed", "hidden", "norm"} & keys.keys()):
        weight = shift + 0.1 * torch.randn(size, generator=random)
        tensors[keys[name] + "weight"] = weight.to(own.dtype)
    proj = torch.randn(size, 2 * size, generator=random) / (2 * size) ** 0.5
    tensors[keys["proj"] + "weight"] = proj.to(own.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


OUTPUTS = re.compile(r"(o_proj|out_proj|down_proj)(\.weight)?$|\.post_(self_attn|mlp)_layernorm\.")


def make_right(folder, keys):
    """Changes a folder with a draft layer so that most guesses are right: layers change little, and
    the draft layer reads the embedding as the first one does."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for key in [key for key in tensors if OUTPUTS.search(key) and "visual" not in key]:
        tensors[key] = tensors[key] * 0.003
    proj = keys["proj"] + "weight"
    size = tensors[proj].shape[0]
    tensors[proj] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1).to(tensors[proj].dtype)
    is_qwen = keys["proj"] == QWEN["proj"]
    tensors[keys["embed"] + "weight"].fill_(0.0 if is_qwen else 1.0)
    if "norm" in keys:
        last = next(key for key in tensors if re.search(r"^model\.(language_model\.)?norm\.", key))
        tensors[keys["norm"] + "weight"] = tensors[last].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def answers(folder, prompts=PROMPTS, params=PARAMS, **options):
    options = {"dtype": "float32", "max_model_len": 512, **options}
    with LLM(str(folder), quiet=True, use_warmup=False, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert {one.error_msg for one in outputs} == {None}
    found = [
        (one.outputs.token_ids, one.outputs.text, one.outputs.finish_reason, one.outputs.logprobs)
        for one in outputs
    ]
    return found, stats


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


class Oracle:
    """The draft layer in plain torch, after transformers' model of the same folder."""

    def __init__(self, folder, family):
        keys, self.is_qwen = KEYS[family], KEYS[family]["proj"] == QWEN["proj"]
        kind = "CausalLM" if KEYS[family] is not GLM else "ImageTextToText"
        self.model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()
        self.decoder = getattr(self.model.model, "language_model", self.model.model)
        (path,) = folder.glob("*.safetensors")
        self.weights = {key: value.float() for key, value in load_file(path).items()}
        self.keys, number = keys, int(keys["from"].split(".")[-2])
        like, config = self.decoder.layers[number], self.decoder.config
        self.layer = type(like)(config, number).eval()
        own = {
            key.removeprefix(keys["layer"]): value
            for key, value in self.weights.items()
            if key.startswith(keys["layer"])
        }
        named = own.keys() & {*self.layer.state_dict()}
        stacked = _stacked({key: own[key] for key in own if key.startswith("mlp.experts.")})
        self.layer.load_state_dict({key: own[key] for key in named} | stacked)

    def norm(self, x, name):
        x = x * (x.square().mean(-1, keepdim=True) + self.decoder.config.rms_norm_eps).rsqrt()
        weight = self.weights[self.keys[name] + "weight"]
        return x * (1 + weight if self.is_qwen else weight)

    @torch.no_grad()
    def run(self, hidden, token_ids):
        """Returns the states of entries 0 .. n of hidden states [n, H] and the next tokens [n]."""
        model = self.decoder
        embeds = self.norm(model.embed_tokens(torch.tensor(token_ids)), "embed")
        x = torch.cat([embeds, self.norm(hidden, "hidden")], -1)
        x = (x @ self.weights[self.keys["proj"] + "weight"].T)[None]
        places = torch.arange(x.shape[1])[None]
        if self.keys is GLM:  # of time, height and width
            places = places.expand(3, 1, -1)
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rope = model.rotary_emb(x, places)
        out = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
        return self.norm(out, "norm")[0] if "norm" in self.keys else model.norm(out)[0]

    @torch.no_grad()
    def guesses(self, token_ids, count):
        """Returns `count` guesses after token_ids, whose last one is not computed yet."""
        found, text = [], list(token_ids)
        hidden = self.decoder(torch.tensor([text[:-1]])).last_hidden_state[0]
        for _ in range(count):
            last = self.run(hidden, text[1:])[-1]
            found.append(int(self.model.lm_head(last).argmax()))
            text.append(found[-1])
            hidden = torch.cat([hidden, last[None]])
        return found


def _stacked(experts):
    """Returns stacks of the matrices of single experts, as transformers' modules have them."""
    count = len([key for key in experts if key.endswith("down_proj.weight")])
    if not count:  # they are stacked already, or there are none
        return {}

    def of(name):
        return [experts.pop(f"mlp.experts.{number}.{name}.weight") for number in range(count)]

    pairs = zip(of("gate_proj"), of("up_proj"), strict=True)
    stacks = {
        "mlp.experts.gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs]),
        "mlp.experts.down_proj": torch.stack(of("down_proj")),
    }
    assert not experts, "all are of experts"
    return stacks
