"""DashInfer on the CPU with bf16 products, for compare.py. Qwen2 without images only."""

import time

BEGUN = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import serve  # noqa: E402
import torch  # noqa: E402
import workloads  # noqa: E402
from dashinfer import allspark  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.utils.dlpack import to_dlpack  # noqa: E402

NAME = "model"
COPIED = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
)


class DashInfer:
    """See serve.Engine."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)  # torch carries ids only
        self._engine = allspark.Engine()
        self._folder = tempfile.TemporaryDirectory()
        self._convert(Path(model))
        self._engine.build_model_from_config_struct(
            allspark.AsModelConfig(
                model_name=NAME,
                model_path=os.path.join(self._folder.name, f"{NAME}.dimodel"),
                weights_path=os.path.join(self._folder.name, f"{NAME}.ditensors"),
                compute_unit="CPU:0",
                engine_max_length=512,
                engine_max_batch=32,
                num_threads=os.cpu_count(),
                matmul_precision="medium",  # bf16
            )
        )
        self._engine.start_model(NAME)

    def _convert(self, model: Path) -> None:
        """Writes the model in the engine's own format."""
        config = json.loads((model / "config.json").read_text())
        weights = {k: v.float() for k, v in load_file(model / "model.safetensors").items()}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
        sizes = {name: config[name] for name in COPIED}
        sizes["size_per_head"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        self._engine.serialize_model_from_torch(
            model_name=NAME,
            model_type="Qwen_v20",
            torch_model=weights,
            model_config=sizes,
            save_dir=self._folder.name,
            multinode_mode=0,
            data_type="float32",
            rotary_base=config["rope_parameters"]["rope_theta"],
        )

    def texts(self, requests: list[workloads.TextRequest]) -> int:
        """See serve.Engine."""
        running = []
        for request in requests:
            ids = torch.tensor([request.token_ids])
            params = _params(len(request.token_ids) + request.num_output_tokens)
            _, handle, _ = self._engine.start_request(NAME, {"input_ids": to_dlpack(ids)}, params)
            running.append((handle, ids))  # the ids must live as long as the request
        self._engine.sync_request(NAME, None)
        for handle, _ in running:
            self._engine.release_request(NAME, handle)
        return sum(request.num_output_tokens for request in requests)

    def images(self, images: list[Any], num_output_tokens: int) -> int:
        """Not supported by this engine."""
        raise NotImplementedError


def _params(max_length: int) -> dict[str, Any]:
    return {
        "max_length": max_length,
        "min_length": 0,
        "top_k": 1,
        "top_p": 0.8,
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "early_stopping": False,
        "stop_words_ids": [],
        "eos_token_id": 2,
        "seed": 1,
    }


if __name__ == "__main__":
    args = serve.parse()
    if args.precision != "bf16" or args.images:
        sys.exit("DashInfer is compared on text in bf16 only")
    serve.serve(f"DashInfer {version('dashinfer')}", BEGUN, DashInfer(args.model))
