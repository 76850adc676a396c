"""Train the draft head of shapes-vl, with which LLM(speculative="mtp") guesses tokens.

    python draft_head.py --model my-shapes-vl --out my-shapes-vl-drafts --minutes 12

The model stays as it is: a head of ERNIE's form (mtp_*) learns to say what the model will say two
tokens later, from the model's hidden state and the embedding of the next token, and then three and
four tokens later, from its own hidden states. The targets are the model's own probabilities. The
folder given by --out is a copy of the model with the head in its weights. One thread.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from data import Batch, batches
from faster import keep_memory, use_shortcuts
from learning import attention_mask, see
from safetensors.torch import load_file, save_file
from targets import IGNORE
from torch import Tensor, nn
from train import HELD_OUT_SEED
from transformers import Ernie4_5_VLMoeForConditionalGeneration, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeDecoderLayer,
)

SEED = 4_000_000  # of scenes that train.py does not draw
NUM_DEPTHS = 3  # guesses in a row that are trained
POOL_SIZE = 64  # batches from which a step takes one
NUM_USES = 3  # times that a batch is used: the model's own pass costs more than the head's
KINDS = ("image", "video")


class Head(nn.Module):
    """A draft head in plain torch; the first layer of the model has the form of its layer."""

    def __init__(self, model: Ernie4_5_VLMoeForConditionalGeneration) -> None:
        super().__init__()
        config = model.config.text_config
        size = config.hidden_size
        self.emb_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.linear_proj = nn.Linear(2 * size, size, bias=False)
        self.block = Ernie4_5_VLMoeDecoderLayer(config, 0)
        self.block.load_state_dict(model.model.language_model.layers[0].state_dict())

    def forward(self, seen: Seen, hidden: Tensor) -> Tensor:
        """Return the states after the layer, before the model's norm: [B, S, H]."""
        x = self.linear_proj(
            torch.cat([self.emb_norm(seen.following), self.hidden_norm(hidden)], -1)
        )
        found = self.block(
            x, position_embeddings=seen.rope, attention_mask=seen.mask, moe_mm_token_type_ids=None
        )
        return found[0] if isinstance(found, tuple) else found

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in ERNIE's checkpoints."""
        found = {}
        for name, value in self.state_dict().items():
            module, _, rest = name.partition(".")
            found[f"model.mtp_{module}.0.{rest}"] = value.to(torch.bfloat16).contiguous()
        return found


class Seen:
    """What the model makes of a batch: its states, and what the head reads beside them."""

    def __init__(self, model: Ernie4_5_VLMoeForConditionalGeneration, batch: Batch) -> None:
        config, ids = model.config, torch.from_numpy(batch.ids)
        branches = torch.from_numpy(batch.branches)
        media = [
            getattr(config, f"{kind}{part}_token_id")
            for kind in KINDS
            for part in ("", "_start", "_end")
        ]
        seen, is_clip = see(model, batch), batch.grids[:, 0] > 1
        outputs = {
            kind: BaseModelOutputWithPooling(pooler_output=tokens)
            for kind, wanted in zip(KINDS, (False, True), strict=True)
            if (tokens := [x for x, clip in zip(seen, is_clip, strict=True) if clip == wanted])
        }
        inputs: list[Tensor] = []
        decoder = model.model.language_model
        note = decoder.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        self.mask = attention_mask(branches)
        positions = torch.from_numpy(batch.positions)
        self.hidden = model.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            moe_mm_token_type_ids=torch.isin(ids, torch.tensor(media)).int(),
            mm_encoder_outputs=outputs,
            use_cache=False,
        ).last_hidden_state.float()
        note.remove()
        embeds = inputs[0].float()
        self.rope = decoder.rotary_emb(embeds, positions)
        self.following = embeds.roll(-1, 1)
        labels = torch.from_numpy(batch.labels).roll(-1, 1)
        # The last token of a branch has no next one, and what is said two tokens later is said by
        # the model at the next token.
        self.chosen = (labels != IGNORE) & (branches == branches.roll(-1, 1))
        self.said = model.lm_head(self.hidden).roll(-1, 1)[self.chosen]


def losses_of(model: nn.Module, head: Head, seen: Seen) -> Iterator[tuple[Tensor, float]]:
    """Yield for each depth the cross-entropy with the model, and the share of right guesses."""
    hidden, wanted = seen.hidden, seen.said.softmax(-1)
    for _ in range(NUM_DEPTHS):
        hidden = model.model.language_model.norm(head(seen, hidden))
        logits = model.lm_head(hidden[seen.chosen])
        right = (logits.argmax(-1) == seen.said.argmax(-1)).float().mean()
        yield nn.functional.cross_entropy(logits, wanted), right.item()
        hidden = hidden.roll(1, 1)  # a guess reads the state of the guess before it


def seen_by(model: Ernie4_5_VLMoeForConditionalGeneration, batch: Batch) -> Seen:
    """Run the model over a batch."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return Seen(model, batch)


def save(head: Head, model_folder: Path, out: Path) -> int:
    """Copy the model with the head; return the size of its weights in bytes."""
    if out.resolve() != model_folder.resolve():
        shutil.copytree(model_folder, out, dirs_exist_ok=True)
    weights = {**load_file(model_folder / "model.safetensors"), **head.tensors()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return (out / "model.safetensors").stat().st_size


def main() -> None:
    """Train, print how many guesses are right, and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a shapes-vl model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=12, help="of the processor (12)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a step (8)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (2e-3)")
    args = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    model = Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32)
    model.eval().requires_grad_(False)
    head = Head(model).requires_grad_(True)
    use_shortcuts(model)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.98))
    text = tokenizer.backend_tokenizer.to_str()
    feed, held_out = batches(text, SEED, args.batch_size), next(batches(text, HELD_OUT_SEED, 16))
    begin, step, progress = time.process_time(), 0, 0.0
    pool: deque[Seen] = deque(maxlen=POOL_SIZE)
    random = np.random.default_rng(0)
    while progress < 1:
        progress = (time.process_time() - begin) / (60 * args.minutes)
        if step % NUM_USES == 0:
            pool.append(seen_by(model, next(feed)))
        rate = min(1.0, (step + 1) / 50) * max(0.01, 0.5 * (1 + math.cos(math.pi * progress)))
        optimizer.param_groups[0]["lr"] = args.rate * rate
        found = [*losses_of(model, head, pool[random.integers(len(pool))])]
        sum(loss for loss, _ in found).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            shares = ", ".join(f"{100 * right:.1f} %" for _, right in found)
            print(f"step {step}, {progress:.0%}: {shares} of guesses right", flush=True)
    with torch.no_grad():
        shares = [right for _, right in losses_of(model, head, seen_by(model, held_out))]
    size = save(head, args.model, args.out)
    print(f"{size} bytes; held out: {', '.join(f'{100 * right:.1f} %' for right in shares)} right")


if __name__ == "__main__":
    main()
