"""How the layers of this package are sharded over ranks (see system/sharding/shards.py), so that a
plugin whose model consists of them declares nothing.

Attention is split by heads, MLPs and experts by their inner channels, embedding and output head by
tokens: two all-reduces per layer. Routers and norms are replicated. A vision tower is split in the
same way, because it takes much memory, and most of the time of a prefill with images. Modules of a
tower whose sizes are not divisible stay whole; in the decoder that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from mmdeploy_llm.errors import ConfigError, PluginContractError
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.mlp import MLP, GatedMLP
from mmdeploy_llm.layers.states.gated_delta import GatedDeltaNet
from mmdeploy_llm.layers.states.short_conv import GatedShortConv

from .decoder import Attention, CausalLM, Decoder
from .moe import ModalityMLP, SparseMLP
from .plain_vision import PlainVisionAttention
from .vision import VisionAttention

# Module -> styles of its submodules; "" is the module itself.
STYLES: Mapping[type[nn.Module], Mapping[str, str]] = {
    Attention: {"qkv_proj": "heads", "o_proj": "rowwise-partial"},
    VisionAttention: {"qkv": "heads", "proj": "rowwise-partial"},
    PlainVisionAttention: {"qkv": "heads", "proj": "rowwise-partial"},
    GatedMLP: {"gate_up_proj": "colwise", "down_proj": "rowwise-partial"},
    MLP: {"fc1": "colwise", "fc2": "rowwise-partial"},
    GatedShortConv: {"conv": "state-heads", "out_proj": "rowwise-partial"},
    GatedDeltaNet: {"conv1d": "state-heads", "out_proj": "rowwise-partial"},
    Experts: {"": "experts-partial"},
    Decoder: {"embed_tokens": "vocab"},
    CausalLM: {"lm_head": "vocab"},
}
SUMS = (
    Attention,
    GatedDeltaNet,
    GatedShortConv,
    VisionAttention,
    PlainVisionAttention,
    GatedMLP,
    MLP,
    SparseMLP,
    ModalityMLP,
)


def tp_plan(
    model: nn.Module, num_ranks: int, own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns module name -> style for the whole model. own: a plugin's name patterns -> styles,
    which take precedence. Raises PluginContractError for a pattern that matches nothing,
    ConfigError for a model whose heads cannot be divided."""
    plan: dict[str, str] = {}
    _visit(model, "", plan, num_ranks, is_summed=False, is_decoder=False)
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in (own or {}).items():
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise PluginContractError(
                f"the tp_plan of {type(model).__name__} has the pattern {pattern!r}, which matches "
                f"none of its modules; their names are like {', '.join(names[:3])}, ..."
            )
        plan.update(dict.fromkeys(found, style))
    return plan


def _visit(
    module: nn.Module,
    path: str,
    plan: dict[str, str],
    num_ranks: int,
    *,
    is_summed: bool,
    is_decoder: bool,
) -> None:
    if isinstance(module, Attention) and module.has_full_norms:
        raise ConfigError(
            f"tensor_parallel_size = {num_ranks}, but norms of this model cover all heads of query "
            "and key, so that heads cannot be divided; use tensor_parallel_size=1"
        )
    is_decoder = is_decoder or isinstance(module, Decoder)
    is_decoder = is_decoder or getattr(module, "has_decoder_layers", False)
    prefix = f"{path}." if path else ""
    if is_decoder or isinstance(module, CausalLM) or _divides(module, num_ranks):
        if isinstance(module, SUMS) and not is_summed:
            plan[path] = "sum"
            is_summed = True
        for name, style in _styles_of(module).items():
            if name == "" and not is_summed:
                plan[path] = "experts"
            elif name == "":
                plan[path] = style
            elif getattr(module, name) is not None:
                plan[prefix + name] = style
    for name, child in module.named_children():
        _visit(child, prefix + name, plan, num_ranks, is_summed=is_summed, is_decoder=is_decoder)


def _styles_of(module: nn.Module) -> Mapping[str, str]:
    return next((styles for kind, styles in STYLES.items() if isinstance(module, kind)), {})


def _divides(module: nn.Module, num_ranks: int) -> bool:
    """Whether a module outside the decoder can be split, its sizes being divisible by
    num_ranks."""
    if isinstance(module, PlainVisionAttention) and module.q_norm is not None:
        return False  # the norm covers all heads, so that no rank can compute it alone
    if isinstance(module, (VisionAttention, PlainVisionAttention)):
        return module.num_heads % num_ranks == 0
    sizes = {MLP: "fc2", GatedMLP: "down_proj"}
    name = next((name for kind, name in sizes.items() if isinstance(module, kind)), None)
    return name is None or getattr(module, name).weight.shape[1] % num_ranks == 0
