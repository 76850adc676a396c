"""Train shapes-vl, a small real vision-language model, on scenes drawn while it learns.

    python train.py --out my-shapes-vl                     90 minutes
    python train.py --out try --minutes 10                 a quick look: captions mostly right
    python train.py --out exact --steps 4000               the same weights on every run
    python train.py --out more --resume my-shapes-vl.training.pt      continue a finished run

The folder given by --out is complete (weights, tokenizer, chat template, processor) and is
refreshed every --save-every minutes, so that the run may be stopped at any time. OUT.training.pt
next to it holds what a later run needs to continue (weights before averaging, optimizer).

Work is split by rows over --processes of one thread each: on two cores that is faster than one
process with two threads, and much faster while other programs run.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

import torch
from data import DEFAULT_MIXTURE, Mixture, batches
from faster import check_shortcuts, keep_memory, use_shortcuts
from guide import Guide
from learning import accuracy, loss_of, see
from model import make_config, make_model, save_folder
from optimizer import make_optimizers
from tokenizer import train_tokenizer
from torch import distributed, multiprocessing, nn
from transformers import PreTrainedTokenizerFast

HELD_OUT_SEED = 1_000_003
EMA_DECAY = 0.998


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--minutes", type=float, default=90, help="length of the run (90)")
    parser.add_argument(
        "--steps",
        type=int,
        help="length in steps instead: the result then does not depend on the machine's speed",
    )
    parser.add_argument(
        "--look-steps",
        type=int,
        default=400,
        help="first steps, vision side only (400)",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=DEFAULT_MIXTURE.questions,
        help="short questions in a row, besides the caption and the answer with thinking (5)",
    )
    parser.add_argument(
        "--thinking",
        type=float,
        default=DEFAULT_MIXTURE.thinking,
        help="share of rows that have an answer with thinking (0.7)",
    )
    parser.add_argument(
        "--clips",
        type=float,
        default=DEFAULT_MIXTURE.clips,
        help="share of rows with a clip instead of an image (0.15)",
    )
    parser.add_argument(
        "--answer-weight",
        type=float,
        default=DEFAULT_MIXTURE.answer_weight,
        help="weight of a token of a short answer (2)",
    )
    parser.add_argument("--seed", type=int, default=0, help="weights and scenes (0)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a step (32)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (3e-3)")
    parser.add_argument("--processes", type=int, default=2, help="training processes (2)")
    parser.add_argument("--save-every", type=float, default=8, help="minutes between saves (8)")
    parser.add_argument("--resume", type=Path, help="a .training.pt file to continue from")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    return parser.parse_args()


def rate_factor(step: int, progress: float) -> float:
    """Return the rate: a warm-up over steps, then a cosine over the progress (0 to 1)."""
    return min(1.0, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Average:
    """A running average of the weights, more accurate and steadier than the last ones."""

    def __init__(self, model: nn.Module) -> None:
        self.source = model.state_dict()
        self.weights = {name: tensor.clone() for name, tensor in self.source.items()}

    def update(self, step: int) -> None:
        """Add the model's current weights to the average."""
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        mine, theirs = list(self.weights.values()), list(self.source.values())
        torch._foreach_lerp_(mine, theirs, 1 - decay)


class Run:
    """One process of a training run; process 0 also evaluates, saves and prints."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        keep_memory()
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        self.options, self.rank = options, rank
        self.tokenizer = self._tokenizer()
        self.model = make_model(make_config(self.tokenizer))
        self.average = Average(self.model)
        self.guide = Guide(self.model, self.tokenizer)
        learners = nn.ModuleList([self.model, self.guide])
        self.optimizers = make_optimizers(learners, options.rate)
        self.trained = [p for p in learners.parameters() if p.requires_grad]
        self.seen = self.earlier_steps = 0
        if options.resume:
            self._resume()
        tokenizer_json = self.tokenizer.backend_tokenizer.to_str()
        # A resumed run draws other scenes than the run before it.
        seed = options.seed + 100_000 * self.earlier_steps
        size = options.batch_size // options.processes
        mixture = Mixture(
            questions=options.questions,
            thinking=options.thinking,
            clips=options.clips,
            answer_weight=options.answer_weight,
        )
        self.feed = batches(tokenizer_json, seed, size, part=rank, mixture=mixture)
        if rank == 0:
            source = batches(tokenizer_json, HELD_OUT_SEED, 32)
            self.held_out = [next(source) for _ in range(8)]
            check_shortcuts(self.model, loss_of, self.held_out[0])
            self.judge = make_model(self.model.config)
            use_shortcuts(self.judge)
        use_shortcuts(self.model)

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """Load the folder's tokenizer for a resumed run: a new one, trained on questions that may
        have changed since, could assign other ids to the words."""
        if self.options.resume is None:
            return train_tokenizer()
        folder = self.options.resume.with_name(
            self.options.resume.name.removesuffix(".training.pt")
        )
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def work(self) -> None:
        """Train until the time or the number of steps is used up."""
        begin = saved_at = time.monotonic()
        step, progress, total = 0, 0.0, 0.0
        while progress < 1:
            rate = self.options.rate * rate_factor(self._steps_at_work(step), progress)
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = rate
            total += self._step(step)
            step += 1
            elapsed = time.monotonic() - begin
            mine = elapsed / (self.options.minutes * 60)
            if self.options.steps:
                mine = step / self.options.steps
            progress = self._agree(mine)
            if self.rank == 0 and step % 100 == 0:
                rows = step * self.options.batch_size
                rate = f"{rows / elapsed:.0f} rows/s"
                print(f"step {step}  {elapsed:.0f} s  {rate}  loss {total / 100:.4f}", flush=True)
                total = 0.0
            due = progress >= 1 or time.monotonic() - saved_at > self.options.save_every * 60
            if self.rank == 0 and due:
                self._save(step)
                saved_at = time.monotonic()

    def _steps_at_work(self, step: int) -> int:
        """Return the steps since the run or the text training began: both need a warm-up."""
        look = self.options.look_steps - self.earlier_steps
        return step - look if step >= look > 0 else step

    def _step(self, step: int) -> float:
        batch = next(self.feed)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.options.float32):
            if step + self.earlier_steps < self.options.look_steps:
                tokens = torch.cat(see(self.model, batch))
                embeddings = self.model.get_input_embeddings().weight
                loss = self.guide.seeing(tokens, embeddings, batch)
            else:
                loss = loss_of(self.model, batch, self.guide)
        loss.backward()
        self._share_gradients()
        nn.utils.clip_grad_norm_(self.trained, 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(step + self.earlier_steps)
        return loss.item()

    def _share_gradients(self) -> None:
        if self.options.processes == 1:
            return
        gradients = [p.grad for p in self.trained if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.options.processes
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _agree(self, progress: float) -> float:
        """Return the progress measured by process 0, so that all stop at the same step."""
        if self.options.processes == 1:
            return progress
        value = torch.tensor([progress], dtype=torch.float64)
        distributed.broadcast(value, 0)
        return float(value)

    def _resume(self) -> None:
        state = torch.load(self.options.resume, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = Average(self.model)
        for name, tensor in state["average"].items():
            self.average.weights[name].copy_(tensor)
        self.guide.load_state_dict(state["guide"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.earlier_steps = state["steps"]

    def _save(self, step: int) -> None:
        out = self.options.out
        self.judge.load_state_dict(self.average.weights)
        report(accuracy(self.judge, self.held_out))
        save_folder(self.average.weights, self.model.config, self.tokenizer, out)
        state = {
            "model": self.model.state_dict(),
            "average": self.average.weights,
            "guide": self.guide.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "steps": step + self.earlier_steps,
        }
        torch.save(state, out.with_name(f"{out.name}.training.pt"))


def report(counts: dict[str, tuple[int, int]]) -> None:
    """Print one line with the share of right answers for each kind of question."""
    parts = [f"{kind} {100 * right / asked:.1f}" for kind, (right, asked) in counts.items()]
    print("held out, teacher-forced: " + ", ".join(parts), flush=True)


def run_process(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """Run one training process; the processes find each other through the file `meeting`."""
    if options.processes > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.processes
        )
    Run(options, rank).work()
    if options.processes > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def main() -> None:
    """Start the processes and wait for them."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, str(Path(folder) / "meeting"))
        if options.processes == 1:
            run_process(0, *arguments)
        else:
            multiprocessing.spawn(run_process, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
