#!/usr/bin/env bash
# transformers 5.24.0: one second of speech, alone and in a batch with a longer sound, through
# Wav2Vec2FeatureExtractor (of Wav2Vec2, HuBERT, WavLM, Data2Vec ... models), then through two models
# with random weights, which differ in `feat_extract_norm` only. How far off is the second in the batch?
#
#                                                     attention mask
#                                                     no (the default)     yes
#     the features: deviation, alone 1.00
#         beside 2, 4, 10 seconds                     1.41  2.00  3.16     1.00  1.00  1.00
#     what the features have in the padding           not zero             zero
#     hidden states, "layer", beside 10 seconds       off by 34 percent    as alone
#     hidden states, "group", beside 10 seconds       off by 74 percent    off by 74 percent
#
# The extractor pads first and makes mean 0 and deviation 1 afterwards. It leaves the padding out only
# where it has made a mask, and by default it makes none: a sound is then louder the longer its
# neighbours are, by the root of the lengths' ratio. Its documentation says of the models without a
# mask that their input "should simply be padded with 0"; the padding it makes is not 0. One expects
# that a mask is for the attention of the model, and that asking for none leaves the numbers alone.
# Models with "group" normalise once more, each channel over all the time with the padding, and the
# mask does not reach there: whatever one does, padding changes what they say. Nothing fails; a sound's
# vectors depend on how the data set was sorted. Ask for the mask, and with "group" make batches of
# equal lengths or of one. (How much worse a trained model gets was not measured here.)
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	transformers==5.24.0 torch==2.13.0 numpy==2.3.4
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import torch
import transformers

RATE = 16_000
generator = np.random.default_rng(0)
torch.manual_seed(0)
times = np.arange(RATE) / RATE
tone = 0.3 * np.sin(2 * np.pi * 300 * times) * np.exp(-3 * times)
sound = (tone + 0.01 * generator.standard_normal(RATE)).astype(np.float32)
neighbours = {
    seconds: (0.1 * generator.standard_normal(seconds * RATE)).astype(np.float32)
    for seconds in (2, 4, 10)
}


def features(sounds, mask):
    """Returns what the extractor makes; mask: None for its default."""
    options = {} if mask is None else {"return_attention_mask": mask}
    extractor = transformers.Wav2Vec2FeatureExtractor(**options)
    made = extractor(sounds, sampling_rate=RATE, padding=True, return_tensors="pt")
    assert ("attention_mask" in made) == bool(mask)
    return made


alone = features([sound], None)["input_values"][0]
assert abs(float(alone.std()) - 1) < 0.001
for mask in (None, True):
    for seconds, other in neighbours.items():
        values = features([sound, other], mask)["input_values"][0]
        own, padding = values[:RATE], values[RATE:]
        deviation = float(own.std())
        print(f"mask {mask}, beside {seconds:2d} s: deviation {deviation:.2f}, padding {padding[0]:.4f}")
        assert abs(deviation - (1 if mask else seconds**0.5)) < 0.02, "the features have changed"
        assert (padding == 0).all() if mask else (padding != 0).all(), "the padding has changed"

OFF = {("layer", None): 0.34, ("layer", True): 0, ("group", None): 0.74, ("group", True): 0.74}
for norm in ("layer", "group"):
    model = transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            conv_dim=(32,) * 7,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm=norm,
            conv_bias=norm == "layer",  # as the published models of each kind
            do_stable_layer_norm=norm == "layer",
        )
    ).eval()
    for mask in (None, True):
        with torch.no_grad():
            single, batch = (
                model(**features(sounds, mask)).last_hidden_state[0, :48]
                for sounds in ([sound], [sound, neighbours[10]])
            )
        off = float((batch - single).norm() / single.norm())
        print(f"{norm}, mask {mask}: the hidden states are off by {100 * off:.2f} percent")
        assert abs(off - OFF[norm, mask]) < (0.05 if OFF[norm, mask] else 0.001), "it has changed"
PYTHON
