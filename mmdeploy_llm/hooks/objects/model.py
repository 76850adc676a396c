"""Says what the engine asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mmdeploy_llm.caches import CrossKV
from mmdeploy_llm.request import MediaInput, MediaSpan

if TYPE_CHECKING:
    from torch import Tensor

    from mmdeploy_llm.forward import ForwardInputs


class Model(Protocol):
    """A model, as a ModelSpec's factory builds it: an ordinary nn.Module for one device.

    Shapes: T tokens, N rows whose logits are needed. A model may also have these attributes:

    media_size: width of the rows of `encode_media` where it is not hidden_size; see `media_size`.
    cache: what each layer keeps where that is not the same keys and values in all; see
        `caches.layer_caches`.
    cross: a caches.CrossKV, of a decoder that attends to an encoder's items: `encode_media` then
        returns the keys and values of an item, `CrossKV.shape(num_tokens)`, and layers read them by
        `inputs.cross`; see also `ModelSpec.encoder`.
    answer_attention(kept, num_tokens): of a model with `cross` that says itself to which places of
        an item the tokens of an answer belong, with what `encode_media` returned of it and the
        number of tokens: weights [num_tokens, heads, places], for prompts with
        `EncoderPrompt.heads`.
    max_positions: the most tokens of a sequence that it computes; max_model_len is lowered to it.
    has_sinks, has_alibi: True where its attention has sinks, or linear biases; see
        `forward.AttentionContext.attend`.
    has_softcaps: True where it caps attention scores, likewise.
    positions_of(token_ids, media): called in place of `positions` for each prompt with media, where
        the model counts from the tokens between them.
    is_cacheable: False where its weights are not kept, packed, for the next start (see
        weight_cache), because its modules compute with them while it is loaded.
    sees_prompts: True where all tokens of a prompt with media attend to each other in both
        directions, those of text too: every prompt is then computed in one step, without prefixes
        of others. Its spec has `atomic_media`.
    long_after: tokens of a sequence after which all of it is computed differently; see
        `forward.ForwardInputs`.

    text_layers: the layers that compute text, which are rounded to 4 bits where `quantization` says
        so, and other matrices, of towers and output heads, to 8. Without it all are rounded alike.
        layers.CausalLM has it.
    tied_head: the embedding that is the output head too, or None; likewise.
    draft_head: a module that guesses the token after the next, which ModelSpec.draft_head has
        added; None without. Its layer keeps an entry for each token whose next one is known, in a
        PagedKV after those of the model's layers in `cache`. Called as draft_head(inputs, hidden)
        it returns hidden states [T, hidden], from which `logits` guesses and which take the place
        of `hidden` for the guess after it. hidden: what `forward` returned. inputs: of the same
        places, with the token ids and media of the place after each.

    A model for vectors and scores, which are made of the hidden states of its last layer after a
    prompt is computed, may have these, which layers/pooling/abilities.py reads:

    is_embedder: True where it cannot generate text; `logits` is then never called.
    is_bidirectional: True where tokens attend in both directions over their whole prompt, which is
        then computed in one step, without a cache: `cache` may be an empty sequence, and the window
        of `inputs.attn.attend` is window // 2 tokens to each side. It cannot generate either.
    default_pooling: what the checkpoint's vectors are: "last", "cls" or "mean" of the states of its
        tokens, or "tokens", one for each; None for a generating model.
    text_length: tokens to which a text is filled with the tokenizer's padding, where the model was
        trained with texts of one length, and attends to the padding.
    embedding(pooled): maps [N, hidden], pooled or states of tokens, to vectors [N, size].
    score(pooled): maps [N, hidden] to [N, labels], the logits of a head that classifies.

    Each of its modules that has a method `init_buffers(device)` is asked once, after the weights
    are loaded, to compute its buffers that are not in the checkpoint: it is called on every rank,
    with the device of the weights, and before the kernels are given to the layers.

    The factory is called as factory(config) with transformers' config object, under
    torch.device("meta"), several times for one engine: to count its memory, to check that it can be
    sharded, on every rank. So it allocates nothing, reads no file and no global state, draws no
    random numbers, and keeps the config as it is. A size or option that it does not implement
    raises ModelNotSupportedError. It knows no limit of the engine (max_model_len, budgets, batch):
    what depends on them comes with each step, in ForwardInputs, and what a model cannot compute it
    states in `max_positions`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns hidden states after the final norm, [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps [N, hidden] to [N, vocab], in float32 or the dtype of `hidden`; greedy choices need
        float32, see layers.keep_sums."""

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns one [num_tokens, media_size] tensor per item, in order. Only for models with
        media."""

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns [axes, num_tokens] int64 M-RoPE positions of a prompt, mostly on 3 axes (time,
        height, width); None when position i is i.

        Called once at start with (1, ()), where None says that the model has no M-RoPE, and then
        for each prompt with media. Tokens of a prompt without media have their index as the
        position on all axes. Tokens generated after a prompt continue at its last token's
        position + 1, on all axes.
        """

    def weight_targets(self, key: str) -> Sequence[object] | None:
        """Returns the parameters that the checkpoint's tensor `key` fills, `weights.map.Target`
        each; () for a tensor that is not needed, None for one that is unknown, which is an error
        when the model loads. Called once for each key of the files, on the meta device; a parameter
        that no key fills is an error, too."""


def media_size(model: Model) -> int:
    """Returns the width of a row of `model.encode_media`: the embedding, followed by whatever
    else the model adds at media positions (for example features for the first layers)."""
    cross = cross_of(model)
    if cross is not None:
        return cross.token_size
    return int(getattr(model, "media_size", model.hidden_size))


def cross_of(model: Model) -> CrossKV | None:
    """Returns what the layers of a model with cross attention keep of an encoder's item."""
    found: CrossKV | None = getattr(model, "cross", None)
    return found
