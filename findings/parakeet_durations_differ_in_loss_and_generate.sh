#!/usr/bin/env bash
# transformers 5.24.0: a Parakeet TDT model whose list of durations is not 0, 1, 2, ... is trained with one
# meaning and decoded with another. A TDT head has an output for each entry of `config.durations`: how many
# frames the decoder moves on with a token.
#
#     config.durations = (0, 1, 2, 4, 8), 16 frames, a head that always chooses the last entry
#     loss of a text of one word    two steps of 8 frames: a word, a blank
#     generate()                    four steps of 4 frames: 4 is the place of the entry in the list
#
# The list is a field of the config, of any whole numbers, and larger jumps are what the paper on TDT
# tries to save time. The published checkpoints have 0 to 4, where place and value are the same, so
# nothing shows. A fine-tuned model with another list has a good loss, and its transcripts say words twice
# or at the wrong times.
#
# Seen with torch 2.13.0, Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer, the package
# index and 1 GB of disk (more where pip takes the CUDA build).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install \
    torch==2.13.0 transformers==5.24.0 numpy==2.3.4
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import math

import torch
import transformers
from transformers import ParakeetForTDT, ParakeetTDTConfig

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
WORD, BLANK, DURATIONS = 3, 9, (0, 1, 2, 4, 8)
encoder = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "subsampling_conv_channels": 4,
    "num_mel_bins": 16,
}
config = ParakeetTDTConfig(
    encoder_config=encoder,
    vocab_size=10,
    decoder_hidden_size=8,
    num_decoder_layers=1,
    blank_token_id=BLANK,
    pad_token_id=2,
    durations=DURATIONS,
)
model = ParakeetForTDT(config).eval()
head = model.joint.head
head.weight.data.zero_()
head.bias.data.zero_()
head.bias.data[[WORD, BLANK]] = 30  # a word or a blank, of equal probability
head.bias.data[-1] = 30  # always the last duration
model.generation_config = transformers.GenerationConfig(decoder_start_token_id=BLANK)
features, mask = torch.randn(1, 128, 16), torch.ones(1, 128, dtype=torch.long)
sound = {"input_features": features, "attention_mask": mask}
with torch.inference_mode():
    frames = model.get_audio_features(**sound).last_hidden_state.shape[1]
    given = torch.tensor([[BLANK, WORD]])
    loss = float(model(**sound, decoder_input_ids=given, labels=given[:, 1:]).loss)
    found = model.generate(**sound, max_new_tokens=16, return_dict_in_generate=True)
durations = found.durations[0].tolist()
print(f"transformers {transformers.__version__}: {frames} frames, durations {DURATIONS}")
print(f"loss of one word: {loss:.3f}; two steps: {2 * math.log(2):.3f}; four: {math.log(16 / 3):.3f}")
print(f"generate: tokens {found.sequences[0].tolist()}, durations {durations}")
assert frames == 16
assert abs(loss - 2 * math.log(2)) < 0.01, "the loss does not count the value of an entry"
assert durations == [0, 4, 4, 4, 4], "generate does not move on by the place of an entry"
PYTHON
