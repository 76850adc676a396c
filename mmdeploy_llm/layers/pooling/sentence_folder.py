"""Reads what a sentence-transformers folder says about its vectors: pooling, dense layers,
normalisation, prompts, lengths. No module of the folder is left out: one that cannot be computed
here is a CheckpointError with its name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar, get_args

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import fault, read_array, read_object, shown
from mmdeploy_llm.values.pooling_request import Pooling

from .rules import Activation, DenseRule, EmbeddingRules, PairRule, Similarity

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
WEIGHTS_FILE = "model.safetensors"
OWNER = "sentence_transformers."  # classes of other packages, and of the folder, are code
MAX_MODULES = 64
MAX_PATH = 255  # characters
MAX_SIZE = 2**20
MAX_TOKENS = 2**25
MAX_TOKEN_ID = 2**22
# Older versions name these files after the kind of the encoder.
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
OLD_POOLINGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: Mapping[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
SIMILARITIES = get_args(Similarity)
DOCUMENTS = ("document", "passage", "corpus")
FAMILIES = ("SentenceTransformer", "CrossEncoder", "MultiVectorEncoder")
FIRST = ("Transformer", "CLIPModel")
LATER = ("Pooling", "Dense", "Normalize", "Dropout", "LogitScore")  # Dropout: only in training
NOT_COMPUTED = (
    "query_expansion",
    "query_length",
    "document_length",
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)
TOKENS, SENTENCE = "token_embeddings", "sentence_embedding"
TASK_OUTPUTS: Mapping[str, str] = {
    "feature-extraction": TOKENS,
    "sequence-classification": "scores",
    "text-generation": "causal_logits",
    "any-to-any": "causal_logits",
    "retrieval": TOKENS,
}
TYPES: Mapping[type, str] = {str: "a text", bool: "true or false", dict: "an object"}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """One line of modules.json. kind: the name of its class."""

    kind: str
    folder: Path
    label: str  # of its config file, for messages


def read_rules(folder: Path) -> EmbeddingRules | None:
    """Returns what a model folder says about its vectors; None where it has no modules.json.

    Raises CheckpointError, with file, what was found and what is allowed, for anything malformed,
    outside the folder, pickled, or not computed here.
    """
    if not os.path.lexists(folder / MODULES_FILE):
        return None
    modules = _modules(folder)
    values = _model_values(folder) | _transformer_values(modules[0])
    output = values.pop("output")
    dense: list[DenseRule] = []
    for module in modules[1:]:
        if values["normalize"] and module.kind != "Dropout":
            raise _not_computed(module, "a module after Normalize", "Normalize as the last")
        if module.kind == "Pooling":
            if output != TOKENS or dense:
                raise _not_computed(module, f"a pooling of {output}", "one, before every Dense")
            values |= _pooling_values(module)
            output = SENTENCE
        elif module.kind == "LogitScore":
            values |= _score_values(module)
        elif module.kind == "Dense":
            dense.append(_dense(module))
        elif module.kind == "Normalize":
            _check_keys(module, read_object(module.folder / "config.json"))
            values["normalize"] = True
    if output == TOKENS and (dense or values["normalize"]):
        raise _not_computed(modules[0], "no Pooling after the first module", "a Pooling")
    values["pooling"] = values["pooling"] or ("tokens" if output == TOKENS else None)
    _check_sizes(values["size"], dense)
    if values["system"] is not None:
        values["system"] = values["prompts"].get(values["default_prompt"], "")
        if output not in (TOKENS, SENTENCE):
            values["pairs"] = PairRule(has_roles=True)
    return EmbeddingRules(dense=tuple(dense), **values)


def _modules(folder: Path) -> Sequence[_Module]:
    lines = read_array(folder / MODULES_FILE)
    if not 1 <= len(lines) <= MAX_MODULES:
        raise fault(MODULES_FILE, "", f"holds {len(lines)} modules", f"1 to {MAX_MODULES}")
    modules = [_module(folder, number, line) for number, line in enumerate(lines)]
    if modules[0].kind not in FIRST:
        raise _not_computed(modules[0], "another first module", _list(FIRST))
    if modules[0].folder != folder:
        found = f"is {shown(modules[0].folder.name)} for the first module"
        raise fault(MODULES_FILE, "path", found, 'the model itself in the folder, ""')
    for module in modules[1:]:
        if module.kind not in LATER:
            raise _not_computed(module, "another module", _list(LATER))
    names = [line.get("name") for line in lines]
    if any(names.count(name) > 1 for name in names):
        raise fault(MODULES_FILE, "name", "is the same in two modules", "one name for each")
    return modules


def _module(folder: Path, number: int, line: object) -> _Module:
    if not isinstance(line, dict):
        raise fault(MODULES_FILE, f"[{number}]", f"is {shown(line)}", "an object")
    key = f"[{number}]."
    kind = _get(line, MODULES_FILE, "type", str, "", where=key)
    if not kind.startswith(OWNER):
        raise fault(
            MODULES_FILE,
            f"{key}type",
            f"is {shown(kind)}, a class outside sentence-transformers, which would be code to run",
            f"names that begin with {OWNER}",
        )
    if line.get("kwargs"):
        raise fault(MODULES_FILE, f"{key}kwargs", f"is {shown(line['kwargs'])}", "none")
    path = _get(line, MODULES_FILE, "path", str, "", where=key)
    place = _inside(folder, path, f"{key}path")
    return _Module(
        kind=kind.rpartition(".")[2],
        folder=place,
        label=f"{path}/config.json" if path else "config.json",
    )


def _inside(folder: Path, path: str, key: str) -> Path:
    """Returns a module's folder. Its files may be links, as in the hub's cache; it may not."""
    pure = PureWindowsPath(path)
    allowed = "a path below the model's folder"
    if pure.anchor or ".." in pure.parts or "\0" in path or len(path) > MAX_PATH:
        raise fault(MODULES_FILE, key, f"is {shown(path)}", allowed)
    place = folder / path
    try:
        is_inside = place.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        raise fault(MODULES_FILE, key, f"cannot be opened ({error})", allowed) from error
    if not is_inside:
        raise fault(MODULES_FILE, key, f"is {shown(path)}, a link out of the folder", allowed)
    return place


def _model_values(folder: Path) -> dict[str, Any]:
    """Returns what config_sentence_transformers.json says; an empty one is allowed."""
    values = read_object(folder / MODEL_FILE)
    family = _get(values, MODEL_FILE, "model_type", str, FAMILIES[0])
    _one_of(MODEL_FILE, "model_type", family, FAMILIES)
    raw = _get(values, MODEL_FILE, "prompts", dict, {})
    for name, text in raw.items():
        if text is not None and not isinstance(text, str):
            raise fault(MODEL_FILE, f"prompts.{name}", f"is {shown(text)}", "a text")
    prompts = {"query": "", "document": ""} if family == FAMILIES[0] else {}
    prompts |= {name: text or "" for name, text in raw.items()}
    default = _get(values, MODEL_FILE, "default_prompt_name", str, None)
    if default is not None:
        _one_of(MODEL_FILE, "default_prompt_name", default, prompts)
    similarity = _get(values, MODEL_FILE, "similarity_fn_name", str, "cosine")
    _one_of(MODEL_FILE, "similarity_fn_name", similarity, SIMILARITIES)
    activation = _get(values, MODEL_FILE, "activation_fn", str, None)
    return {
        "prompts": prompts,
        "default_prompt": default,
        "query_prompt": "query" if "query" in prompts else None,
        "document_prompt": next((name for name in DOCUMENTS if name in prompts), None),
        "similarity": similarity,
        "dimensions": _whole(values, MODEL_FILE, "truncate_dim", MAX_SIZE),
        "activation": None if activation is None else activation_of(MODEL_FILE, activation),
        "normalize": False,
        "pooling": None,
        "size": None,
    }


def _transformer_values(module: _Module) -> dict[str, Any]:
    """Returns what the file of the first module says, and what the module returns as "output"."""
    name = next((name for name in TRANSFORMER_FILES if (module.folder / name).exists()), None)
    values = read_object(module.folder / name) if name is not None else {}
    name = name or TRANSFORMER_FILES[0]
    task = _get(values, name, "transformer_task", str, "feature-extraction")
    _one_of(name, "transformer_task", task, TASK_OUTPUTS)
    for key in NOT_COMPUTED:
        if values.get(key):
            raise fault(name, key, f"is {shown(values[key])}", "none; it is not computed here")
    options = _get(values, name, "processing_kwargs", dict, {})
    for key in options:
        _one_of(name, "processing_kwargs", key, ("chat_template",))
    inputs = _get(values, name, "modality_config", dict, {})
    of_class = SENTENCE if module.kind == "CLIPModel" else TASK_OUTPUTS[task]
    return {
        "output": _get(values, name, "module_output_name", str, of_class),
        "max_tokens": _max_tokens(module.folder, values, name),
        "lower_case": _get(values, name, "do_lower_case", bool, False),
        "system": "" if "message" in inputs else None,
        "chat_options": _chat_options(name, options) if "message" in inputs else {},
    }


def _chat_options(file: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of the chat template, whose default here would be another."""
    return {"add_generation_prompt": False, **_get(options, file, "chat_template", dict, {})}


def _max_tokens(folder: Path, values: Mapping[str, Any], name: str) -> int | None:
    """Returns the length at which sentence-transformers cuts texts, apart from the model's own."""
    length = _whole(values, name, "max_seq_length", MAX_TOKENS)
    if length is not None:
        return length
    tokenizer = read_object(folder / "tokenizer_config.json").get("model_max_length")
    is_limit = isinstance(tokenizer, int) and 1 <= tokenizer <= MAX_TOKENS
    return int(tokenizer) if is_limit else None  # type: ignore[arg-type]


def _pooling_values(module: _Module) -> dict[str, Any]:
    values = _required(module)
    for key in OLD_POOLINGS:
        _get(values, module.label, key, bool, False)
    modes: Any = values.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_POOLINGS.items() if values.get(key)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1:
        raise fault(module.label, "pooling_mode", f"is {shown(modes)}", "one mode")
    _one_of(module.label, "pooling_mode", modes[0], POOLINGS)
    old = _whole(values, module.label, "word_embedding_dimension", MAX_SIZE)
    size = _whole(values, module.label, "embedding_dimension", MAX_SIZE) or old
    return {
        "pooling": POOLINGS[modes[0]],
        "size": size,
        "includes_prompt": _get(values, module.label, "include_prompt", bool, True),
    }


def _dense(module: _Module) -> DenseRule:
    values = _required(module)
    _check_keys(module, values)
    weights = module.folder / WEIGHTS_FILE
    if not weights.exists():
        pickled = (module.folder / "pytorch_model.bin").exists()
        found = "is missing; pytorch_model.bin is a pickle, which can run code" if pickled else ""
        label = f"{module.folder.name}/{WEIGHTS_FILE}"
        raise fault(label, "", found or "is missing", "weights in safetensors")
    sizes = [_whole(values, module.label, key, MAX_SIZE) for key in ("in_features", "out_features")]
    if None in sizes:
        raise fault(module.label, "in_features, out_features", "are missing", "two sizes")
    default = "torch.nn.modules.activation.Tanh"
    name = _get(values, module.label, "activation_function", str, default)
    return DenseRule(
        weights=weights,
        in_features=sizes[0] or 0,
        out_features=sizes[1] or 0,
        has_bias=_get(values, module.label, "bias", bool, True),
        activation=activation_of(module.label, name),
        is_residual=_get(values, module.label, "use_residual", bool, False),
    )


def _score_values(module: _Module) -> dict[str, Any]:
    values = _required(module)
    _check_keys(module, values, "causal_logits")
    yes = _whole(values, module.label, "true_token_id", MAX_TOKEN_ID, low=0)
    if yes is None:
        raise fault(module.label, "true_token_id", "is missing", "a token id")
    no = _whole(values, module.label, "false_token_id", MAX_TOKEN_ID, low=0)
    return {"score_tokens": (yes, no)}


def _check_sizes(size: int | None, dense: Sequence[DenseRule]) -> None:
    """Checks that each layer takes what the one before it returns."""
    for rule in dense:
        if size is not None and rule.in_features != size:
            label = f"{rule.weights.parent.name}/config.json"
            raise fault(label, "in_features", f"is {rule.in_features}", f"{size}, of its input")
        size = rule.out_features


def _check_keys(module: _Module, values: Mapping[str, Any], default: str = SENTENCE) -> None:
    """Checks that a module reads and writes the vector, or the scores, and nothing else."""
    for key in ("module_input_name", "module_output_name"):
        name = _get(values, module.label, key, str, default)
        _one_of(module.label, key, name, (default,))


def _required(module: _Module) -> Mapping[str, Any]:
    path = module.folder / "config.json"
    if not os.path.lexists(path):
        raise fault(module.label, "", "is missing", f"the options of {module.kind}")
    return read_object(path)


def activation_of(file: str, name: object) -> Activation:
    """Returns what a class of torch is called here. file: that names it."""
    _one_of(file, "activation", name, ACTIVATIONS)
    return ACTIVATIONS[str(name)]


def _one_of(file: str, key: str, value: object, allowed: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise fault(file, key, f"is {shown(value)}", _list(allowed))


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _get(
    values: Mapping[str, Any], file: str, key: str, kind: type[Value], default: Any, where: str = ""
) -> Any:
    """Returns a value of this type, the default where it is null or missing."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise fault(file, where + key, f"is {shown(value)}", TYPES[kind])
    return value


def _whole(
    values: Mapping[str, Any], file: str, key: str, high: int, *, low: int = 1
) -> int | None:
    value = values.get(key)
    if value is not None and not (type(value) is int and low <= value <= high):
        raise fault(file, key, f"is {shown(value)}", f"an integer from {low} to {high}")
    return value


def _not_computed(module: _Module, found: str, allowed: str) -> CheckpointError:
    return fault(MODULES_FILE, "", f"has {found} ({module.kind}), not computed here", allowed)
