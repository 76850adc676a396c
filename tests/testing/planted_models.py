"""Bugs planted in the built-in models and parsers, by replacing what they are made of."""

from dataclasses import replace

import mmdeploy_llm_plugins.reasoning.scanner as scanner
import mmdeploy_llm_plugins.tools.parsers as calls
from mmdeploy_llm_plugins.reasoning.scanner import TagParser
from mmdeploy_llm_plugins.tools.parsers import CallParser

from mmdeploy_llm.hooks import Segment, ToolCall
from mmdeploy_llm.layers.basic.mlp import GatedMLP
from mmdeploy_llm.layers.decoder import Attention, CausalLM, DecoderLayer
from mmdeploy_llm.layers.grid_lm import GridLM
from mmdeploy_llm.layers.moe import SoftmaxRouter


def wrapped(owner, name, change):
    return lambda put: put(owner, name, change(getattr(owner, name)))


def config(**fields):
    """Builds the decoder with other options, as an author does who has not read the config."""

    def change(build):
        def changed(self, given, *further, **named):
            own = {name: value(given) for name, value in fields.items()}
            build(self, replace(given, **own), *further, **named)

        return changed

    return wrapped(CausalLM, "__init__", change)


def rotary(**fields):
    return config(rotary=lambda given: replace(given.rotary, **fields))


def attended(**options):
    """Passes other options to `attend`."""

    def change(method):
        return property(lambda self: {**method.fget(self), **options})

    return wrapped(Attention, "options", change)


def not_needed(part):
    """Says that keys with this part are not needed."""

    def change(targets):
        return lambda self, key: () if part in key else targets(self, key)

    return wrapped(CausalLM, "weight_targets", change)


def both(*plants):
    def plant(put):
        for one in plants:
            one(put)

    return plant


def parallel(forward):
    """Adds attention after the norm has read the stream, not before."""

    def changed(self, x, residual, step):
        x, residual = self.input_layernorm.add(x, residual)
        mixed = self.mix(x, step)
        y, _ = self.post_attention_layernorm.add(residual.clone(), None)
        return self.mlp(y), residual + mixed

    return changed


def heads(order):
    """Attends with heads in another order: order(q, k, v)."""

    def change(forward):
        def changed(self, x, step):
            attend = step.attn.attend

            class Other:
                def attend(self, layer, q, k, v, **options):
                    return attend(layer, *order(q, k, v), **options)

            return forward(self, x, replace(step, attn=Other(), rotary_attn=None))

        return changed

    return wrapped(Attention, "forward", change)


def later_after_media(positions):
    def changed(self, num_tokens, media):
        found = positions(self, num_tokens, media)
        for span in media:
            found[:, span.end :] += 1
        return found

    return changed


def axes_swapped(positions):
    return lambda self, num_tokens, media: positions(self, num_tokens, media)[[0, 2, 1]]


def items_swapped(encode):
    def changed(self, items):
        found = encode(self, items)
        same = len({len(embed) for embed in found}) == 1
        return found[::-1] if same else [embed.roll(1, 0) for embed in found]

    return changed


def always_silu(build):
    return lambda self, *sizes, **options: build(self, *sizes, **{**options, "activation": "silu"})


def not_divided(build):
    def changed(self, size, config):
        build(self, size, replace(config, is_normed=not config.is_normed))

    return changed


def always_divided(build):
    return lambda self, size, config: build(self, size, replace(config, is_normed=True))


# What is wrong: the family, what its grids are, the plant, the check that must find it.
MODELS = {
    "rope base ignored": ("qwen2", rotary(theta=10000.0), "rope_scalings_equal_the_reference"),
    "rope scaling ignored": (
        "llama", rotary(frequencies=None, scale=1.0), "rope_scalings_equal_the_reference"),
    "factor of yarn dropped": (
        "qwen3", rotary(scale=1.0), "rope_scalings_equal_the_reference"),
    "window ignored": ("qwen3", attended(window=None), "windows_equal_the_reference"),
    "window one token longer": (
        "qwen2", config(windows=lambda given: given.windows and tuple(
            window and window + 1 for window in given.windows)), "windows_equal_the_reference"),
    "untied head tied": (
        "ernie4_5", both(config(is_tied=lambda _: True), not_needed("lm_head")),
        "heads_and_biases_equal_the_reference"),
    "tied head untied": (
        "qwen2", config(is_tied=lambda _: False), "heads_and_biases_equal_the_reference"),
    "biases left out": (
        "llama", both(
            config(qkv_bias=lambda _: False, out_bias=lambda _: False), not_needed("_proj.bias")),
        "heads_and_biases_equal_the_reference"),
    "epsilon not read": ("qwen3", config(norm_eps=lambda _: 1e-6), "constants_equal_the_reference"),
    "activation not read": (
        "qwen2", wrapped(GatedMLP, "__init__", always_silu), "constants_equal_the_reference"),
    "a factor as the author's checkpoint has it": (
        "granite", config(residual_scale=lambda _: 0.5), "every_constant_is_read"),
    "a factor of embeddings as the author's checkpoint has it": (
        "granite", config(embed_scale=lambda _: 3.0), "every_constant_is_read"),
    "weights of experts divided whatever the config says": (
        "qwen3_moe", wrapped(SoftmaxRouter, "__init__", always_divided), "every_constant_is_read"),
    "two key heads whatever the config says": (
        "qwen2", config(num_kv_heads=lambda _: 2), "key_heads_equal_the_reference"),
    "residual added too late": (
        "qwen2", wrapped(DecoderLayer, "forward", parallel), "logits_equal_the_reference"),
    "keys and values swapped": (
        "llama", heads(lambda q, k, v: (q, v, k)), "logits_equal_the_reference"),
    "key heads dealt out in turn": (
        "llama", heads(lambda q, k, v: (q, k.flip(1), v.flip(1))), "logits_equal_the_reference"),
    "scale of the hidden size": (
        "llama", attended(scale=64**-0.5), "logits_equal_the_reference"),
    "interleaved rope": ("qwen2", rotary(is_interleaved=True), "logits_equal_the_reference"),
    "norms of heads left out": (
        "qwen3", both(config(qk_norm=lambda _: False), not_needed("_norm.weight")),
        "ignored_keys_are_not_needed"),
    "weights of experts not divided": (
        "qwen3_moe", wrapped(SoftmaxRouter, "__init__", not_divided), "logits_equal_the_reference"),
    "soft cap of logits forgotten": (
        "gemma2", config(logit_softcap=lambda _: None), "logits_equal_the_reference"),
    "text after a picture one further": (
        "qwen2_vl", wrapped(GridLM, "positions", later_after_media),
        "positions_equal_the_reference"),
    "height and width swapped": (
        "qwen2_vl", wrapped(GridLM, "positions", axes_swapped), "positions_equal_the_reference"),
    "pictures swapped": (
        "qwen2_vl", wrapped(GridLM, "encode_media", items_swapped), "logits_equal_the_reference"),
}  # fmt: skip


def eager(_):
    """Holds back nothing that may become a tag."""
    return lambda text, mode: 0


def loses_the_rest(finish):
    def changed(self):
        self._buffer = ""
        return finish(self)

    return changed


def one_for_all(build):
    held = []

    def changed(self):
        build(self)
        self._held = held

    return changed


def without_prompt(start):
    return lambda self, prompt: start(self, "")


def without_tags(feed):
    """Removes tags that come after the thinking."""

    def changed(self, text):
        return [
            Segment(kind=one.kind, text=left)
            for one in feed(self, text)
            if (left := one.text.replace("<think>", "") if one.kind == "content" else one.text)
        ]

    return changed


def shown(leave):
    """Leaves tags in the text."""

    def changed(self, mode, tag, rest):
        self._emit(tag)
        leave(self, mode, tag, rest)

    return changed


def asks_and_reads(next_text):
    def changed(self):
        self.feed("<")
        return next_text(self)

    return changed


# What is wrong: the parser, the plant, the check that must find it.
REASONING = {
    "a split tag dropped": (
        "deepseek-r1", wrapped(scanner, "_num_open", eager), "any_split_equals_the_whole"),
    "what was held back lost": (
        "deepseek-r1", wrapped(TagParser, "finish", loses_the_rest), "the_end_is_kept"),
    "held text of all requests": (
        "glm-4.5", wrapped(TagParser, "__init__", one_for_all), "no_state_is_shared"),
    "the prompt not read": (
        "glm-4.5", wrapped(TagParser, "start", without_prompt), "markers_are_consistent"),
    "a tag in the answer removed": (
        "kimi-k2", wrapped(TagParser, "feed", without_tags), "any_split_equals_the_whole"),
    "tags left in the text": (
        "kimi-k2", wrapped(TagParser, "_leave", shown), "markers_are_consistent"),
    "asking reads": (
        "deepseek-r1", wrapped(TagParser, "next_text", asks_and_reads),
        "next_text_says_what_comes"),
}  # fmt: skip


def without_escapes(read):
    def changed(body, schemas):
        call = read(body, schemas)
        return ToolCall(name=call.name, arguments=call.arguments.replace('\\"', "'"))

    return changed


def up_to_a_brace(read):
    """Looks for the end of the arguments by their braces."""

    def changed(body, schemas):
        head, mark, rest = body.partition("}")
        return read(head + mark + ("}" if rest.strip() else ""), schemas)

    return changed


def one_call(record):
    """Takes the first call only, and drops the others."""

    def changed(self, tags, body):
        before = len(self._found)
        record(self, tags, body)
        if self._num_calls > 1:
            del self._found[before:]

    return changed


def loses_open_calls(finish):
    def changed(self):
        self._tags, self._buffer = None, ""
        return finish(self)

    return changed


def no_opening(_):
    return lambda text, form: 0


def only_at_the_end(feed):
    def changed(self, text):
        self._later = getattr(self, "_later", "") + text
        return []

    return changed


def all_at_the_end(finish):
    def changed(self):
        self._buffer, self._later = getattr(self, "_later", ""), ""
        while self._step():
            pass
        return finish(self)

    return changed


def ascii_only(read):
    def changed(body, schemas):
        return read(body.encode("ascii", "ignore").decode(), schemas)

    return changed


def nothing_else(no_call):
    """Drops the opening tag of what is no call."""

    def changed(self, tags):
        self._buffer, self._tags = self._buffer[len(tags.start) :], None

    return changed


READERS = calls.READERS


def reader(kind, change):
    return lambda put: put(calls, "READERS", {**READERS, kind: change(READERS[kind])})


TOOLS = {
    "escaped quotes lost": ("hermes", reader("json", without_escapes), "values_come_through"),
    "arguments end at a brace": ("hermes", reader("json", up_to_a_brace), "values_come_through"),
    "letters lost": ("qwen3-coder", reader("xml", ascii_only), "values_come_through"),
    "the second call lost": ("hermes", wrapped(CallParser, "_call", one_call), "examples_hold"),
    "an open call lost": (
        "hermes", wrapped(CallParser, "finish", loses_open_calls), "nothing_is_lost"),
    "a split tag of a call missed": (
        "hermes", wrapped(calls, "_num_open", no_opening), "any_split_equals_the_whole"),
    "calls at the end only": (
        "hermes", both(
            wrapped(CallParser, "feed", only_at_the_end),
            wrapped(CallParser, "finish", all_at_the_end)),
        "a_call_comes_when_it_is_complete"),
    "a tag that is no call dropped": (
        "hermes", wrapped(CallParser, "_no_call", nothing_else), "nothing_is_lost"),
}  # fmt: skip
