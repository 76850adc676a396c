"""Tiny random checkpoints of Parakeet, Nemotron ASR and Granite Speech 5, whose tokens and blanks
are about as frequent."""

import json

import torch
import transformers

from mmdeploy_llm.testing.tiny import VOCAB_SIZE, randomize
from mmdeploy_llm.testing.tiny.common import build_tokenizer

BLANK = VOCAB_SIZE  # after the words
RATE = 16000
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
}
EXTRACTOR = {
    "feature_extractor_type": "ParakeetFeatureExtractor",
    "feature_size": 16,
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": RATE,
}
DECODER = {
    "decoder_hidden_size": 24,
    "num_decoder_layers": 2,
    "blank_token_id": BLANK,
    "pad_token_id": 2,
}
NEMOTRON = {
    **ENCODER,
    "conv_kernel_size": 5,
    "sliding_window": 9,
    "default_num_lookahead_tokens": 3,
}
GRANITE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_mel_bins": 16,
    "max_position_embeddings": 40,
    "context_size": 12,
    "conv_kernel_size": 5,
}
GRANITE_EXTRACTOR = {
    "feature_extractor_type": "GraniteSpeech5FeatureExtractor",
    "feature_size": 64,
    "num_mel_bins": 16,
    "sampling_rate": RATE,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "delta_win_length": 3,
    "logmel_floor_db": 8.0,
    "padding_side": "right",
    "padding_value": 0.0,
}
TAGS = ("<de-DE>", "<en-US>")  # tokens after the blank one
LANGUAGES = {"en-US": 0, "en": 0, "de-DE": 2, "de": 2, "auto": 5}
LOOKAHEAD = 2  # of the processor, which goes before the encoder's own


def write(folder, way, *, bias=2.5, seed=0, encoder=None, extractor=None, **fields):
    """Writes a checkpoint. way: "CTC", "RNNT" or "TDT". bias: of the blank token, by which it is
    more frequent. encoder, extractor, fields: what differs in their configs."""
    config = getattr(transformers, f"Parakeet{way}Config")(
        encoder_config={**ENCODER, **(encoder or {})},
        vocab_size=VOCAB_SIZE + 1,
        **{**({"pad_token_id": BLANK} if way == "CTC" else DECODER), **fields},
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"ParakeetFor{way}")(config).eval()
    randomize(model)
    randomize_norms(model)
    head = model.ctc_head if way == "CTC" else model.joint.head
    head.bias.data[BLANK] += bias
    if way == "TDT":  # it would say tokens and stay at a frame without an end
        head.bias.data[BLANK + 1 + config.durations.index(0)] -= 4
    if way != "CTC":
        make_lively(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, pad_token="<blank>" if way == "CTC" else "<s>")
    made = {**EXTRACTOR, **(extractor or {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(made))
    return folder


def randomize_norms(model):
    """Has norms of batches remember some."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.data = 0.3 * torch.randn_like(buffer)
        if name.endswith("running_var"):
            buffer.data = 0.5 + torch.rand_like(buffer)


def make_lively(model):
    """Has what was said change what follows."""
    model.joint.head.weight.data *= 2
    model.decoder.embedding.weight.data *= 4
    model.decoder.decoder_projector.weight.data *= 4
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=BLANK)


def write_tokenizer(folder, *, pad_token, tags=()):
    tokenizer = build_tokenizer(
        chat_template="", eos_token="<blank>", last_tokens=("<blank>", *tags)
    )
    tokenizer.save_pretrained(folder)
    own = folder / "tokenizer_config.json"
    settings = json.loads(own.read_text())
    settings |= {"tokenizer_class": "ParakeetTokenizer", "pad_token": pad_token}
    own.write_text(json.dumps(settings))


def write_nemotron(folder, name, *, bias=2.0, encoder=None, extractor=None, **fields):
    """Writes a checkpoint of "NemotronAsrStreaming" or "Nemotron3_5Asr", with its processor."""
    is_told = name == "Nemotron3_5Asr"
    told = {"num_prompts": 8, "prompt_intermediate_size": 40, "default_prompt_id": 5}
    tags = TAGS if is_told else ()
    config = getattr(transformers, f"{name}Config")(
        encoder_config={**NEMOTRON, **(encoder or {})},
        vocab_size=VOCAB_SIZE + 1 + len(tags),
        **{**DECODER, **(told if is_told else {}), **fields},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForRNNT")(config).eval()
    randomize(model)
    model.joint.head.bias.data[BLANK] += bias
    make_lively(model)
    if is_told:  # a language changes what is heard
        model.prompt_projector.linear_1.weight.data[:, -config.num_prompts :] *= 4
    model.save_pretrained(folder)
    write_tokenizer(folder, pad_token="<s>", tags=tags)
    own = {key: value for key, value in EXTRACTOR.items() if key != "feature_extractor_type"}
    processor = getattr(transformers, f"{name}Processor")(
        transformers.NemotronAsrStreamingFeatureExtractor(**{**own, **(extractor or {})}),
        transformers.AutoTokenizer.from_pretrained(folder),
        default_num_lookahead_tokens=LOOKAHEAD,
        **({"prompt_dictionary": LANGUAGES} if is_told else {}),
    )
    processor.save_pretrained(folder)
    return folder


def write_granite(folder, *, bias=2.0, encoder=None, extractor=None, **fields):
    """Writes a checkpoint of Granite Speech 5."""
    size = VOCAB_SIZE + 1
    config = transformers.GraniteSpeech5CTCConfig(
        encoder_config={**GRANITE, "vocab_size": size, **(encoder or {})},
        vocab_size=size,
        pad_token_id=BLANK,
        **fields,
    )
    torch.manual_seed(0)
    model = transformers.GraniteSpeech5ForCTC(config).eval()
    randomize(model)
    randomize_norms(model)
    model.ctc_head.bias.data[BLANK] += bias  # where it is tied, of the head in the middle too
    model.save_pretrained(folder)
    write_tokenizer(folder, pad_token="<blank>")
    made = {**GRANITE_EXTRACTOR, **(extractor or {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(made))
    return folder
