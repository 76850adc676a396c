"""Plugin `attention`: the attention backends of this package. It is loaded whatever `plugins`
names, unless it is blocked."""

from mmdeploy_llm.hooks import AttentionBackendSpec, hookimpl

HALF = ("bfloat16", "float16")
FLASH_2_BLOCK = 256  # flash-attn 2, and torch's copy of it, take blocks of a multiple of this
TMA_BLOCK = 128  # a page that equals their key tile, so that the TMA unit fetches it
ROOM = "mmdeploy_llm.layers.attention.providers"


def _on_cuda(name: str, function: str, **options: object) -> AttentionBackendSpec:
    """Returns a backend on CUDA cards; what is said here holds for most."""
    usual = {
        "devices": ("cuda",),
        "dtypes": HALF,
        "max_head_dim": 256,
        "head_multiple": 8,
        "min_capability": (8, 0),
        "windows": True,
        "softcaps": True,
        "media_spans": True,
        "available": f"{ROOM}:{function}_problem",
    }
    return AttentionBackendSpec(
        name=name,
        factory=f"{ROOM}:new_{function}",
        **{**usual, **options},  # type: ignore[arg-type]
    )


def _cards() -> list[AttentionBackendSpec]:
    """Returns the backends on CUDA. flash-attn 3 is made for Hopper, prefill and decode; 4 is as
    good at prefill on Hopper, but our kernels compute its decode. flash-attn 2 comes before torch's
    copy of it, which has no softcap. Our Triton kernels come last, because the others were tuned
    for years; they alone support float32, caches of few bits, other block sizes and old cards."""
    return [
        # Both accept 8-bit keys only together with 8-bit queries, and our queries have 16 bits.
        _on_cuda(
            "flash-attn-3",
            "flash_3",
            min_capability=(9, 0),
            below_capability=(10, 0),
            block_size=TMA_BLOCK,
            priority=60,
        ),
        _on_cuda(
            "flash-attn-4",
            "flash_4",
            min_capability=(9, 0),
            below_capability=(12, 0),
            block_size=TMA_BLOCK,
            sinks=True,
            priority=50,
        ),
        _on_cuda(
            "flash-attn",
            "flash_2",
            block_multiple=FLASH_2_BLOCK,
            block_size=FLASH_2_BLOCK,
            priority=40,
        ),
        _on_cuda(
            "torch-varlen",
            "torch_varlen",
            block_multiple=FLASH_2_BLOCK,
            block_size=FLASH_2_BLOCK,
            softcaps=False,
            priority=30,
        ),
        _on_cuda(
            "triton",
            "triton",
            dtypes=(*HALF, "float32"),
            cache_dtypes=("int8", "int4", "float8_e4m3fn"),
            min_capability=(7, 0),
            sinks=True,
            priority=20,
        ),
    ]


@hookimpl
def provide_attention_backends() -> list[AttentionBackendSpec]:
    """Returns the backends."""
    return [
        *_cards(),
        AttentionBackendSpec(
            name="native",
            factory=f"{ROOM}:new_native",
            devices=("cpu",),
            dtypes=("bfloat16", "float32"),
            cache_dtypes=("int8", "int4"),
            max_head_dim=512,
            head_multiple=2,
            windows=True,
            softcaps=True,
            sinks=True,
            alibi=True,
            media_spans=True,
            deterministic=True,
            available=f"{ROOM}:native_problem",
            priority=10,
        ),
        AttentionBackendSpec(
            name="reference",
            factory=f"{ROOM}:new_reference",
            devices=("cpu", "cuda"),
            dtypes=(*HALF, "float32"),
            cache_dtypes=(*HALF, "float32", "int4"),
            windows=True,
            softcaps=True,
            sinks=True,
            alibi=True,
            media_spans=True,
            sequences=True,
        ),
    ]
