"""The sessions of compare.py: models with their workloads and peers, and the levels of instructions
that all engines are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

PEERS = ("openvino", "vllm", "dashinfer", "transformers", "llamacpp")
UNITS = MappingProxyType({"text": "tok/s", "vl": "img/s", "alone": "ms/token", "first": "ms"})
# (workload, model, precision, peer) -> the ratio that we want to reach
Targets = Mapping[tuple[str, str, str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model in one precision, and the workloads to run on it. peers: the engines that can run
    it."""

    model: str
    precision: str
    works: tuple[str, ...]
    peers: tuple[str, ...]

    @property
    def has_images(self) -> bool:
        """Whether the workload has images."""
        return "vl" in self.works

    @property
    def title(self) -> str:
        """The name of the session in progress messages and --only."""
        return f"{self.model} {self.precision}{' images' * self.has_images}"

    def suffix(self, engine: str) -> str:
        """Returns what the name of the engine's folder has after the model's name."""
        if engine == "llamacpp":
            return "-gguf"
        if engine == "openvino":
            return "-ov" if self.precision == "bf16" else f"-ov-{self.precision}"
        return ""


TEXTS = ("text", "alone", "first")
SESSIONS = (
    Session(model="qwen05", precision="bf16", works=TEXTS, peers=PEERS),
    Session(model="qwen05", precision="int8", works=TEXTS, peers=("openvino", "llamacpp")),
    Session(
        model="ernie03",
        precision="bf16",
        works=("text",),
        peers=("vllm", "transformers", "llamacpp"),
    ),
    Session(
        model="qwen25vl",
        precision="bf16",
        works=("vl",),
        peers=("openvino", "vllm", "transformers"),
    ),
    Session(model="qwen25vl", precision="int8", works=("vl",), peers=("openvino",)),
    *(
        Session(
            model=model, precision="bf16", works=works, peers=("openvino", "vllm", "transformers")
        )
        for model in ("qwen35", "gemma4")
        for works in (("text",), ("vl",))
    ),
    Session(model="qwen05", precision="int4", works=TEXTS, peers=("openvino", "llamacpp")),
    Session(model="qwen25vl", precision="int4", works=("vl",), peers=("openvino",)),
)

INT4_TARGETS: Targets = {
    ("vl", "qwen25vl", "int4", "openvino"): 1.5,
    **{
        (work, "qwen05", "int4", peer): target
        for peer in ("openvino", "llamacpp")
        for work, target in (("text", 1.5), ("alone", 1.1))
    },
}
NEW_FAMILIES: Targets = {
    (work, model, "bf16", peer): 1.2
    for work in ("text", "vl")
    for model in ("qwen35", "gemma4")
    for peer in ("openvino", "vllm", "transformers")
}
BEST_TARGETS: Targets = {
    **NEW_FAMILIES,
    ("text", "qwen05", "bf16", "openvino"): 1.1,
    ("text", "qwen05", "bf16", "vllm"): 1.2,
    ("alone", "qwen05", "bf16", "openvino"): 1.1,
    ("text", "qwen05", "int8", "openvino"): 1.2,
    ("alone", "qwen05", "int8", "openvino"): 1.1,
    ("text", "ernie03", "bf16", "vllm"): 1.15,
    ("vl", "qwen25vl", "bf16", "openvino"): 1.2,
    ("vl", "qwen25vl", "bf16", "vllm"): 1.4,
    ("vl", "qwen25vl", "int8", "openvino"): 1.5,
    **INT4_TARGETS,
}
AVX2_TARGETS: Targets = {
    **NEW_FAMILIES,
    ("vl", "qwen25vl", "bf16", "openvino"): 1.3,
    ("vl", "qwen25vl", "int8", "openvino"): 1.6,
    **INT4_TARGETS,
    ("text", "ernie03", "bf16", "llamacpp"): 1.3,
    **{
        (work, "qwen05", precision, peer): target
        for peer in ("openvino", "llamacpp")
        for precision, in_texts in (("bf16", 1.3), ("int8", 1.5))
        for work, target in (("text", in_texts), ("alone", 1.1), ("first", 1.3))
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The instructions that all engines are held to.

    name: "" for what the machine has.
    arguments: of our runner. variables: of every process, for torch and oneDNN.
    note: what to know about the level, after the table.
    """

    name: str
    targets: Targets
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def option(self) -> str:
        """The option on the command line."""
        return f" --level {self.name}" if self.name else ""

    @property
    def markers(self) -> tuple[str, str]:
        """The lines of HISTORY.md that the table stands between."""
        words = f"compare.py{' ' + self.name if self.name else ''}"
        return f"<!-- {words}: begin -->", f"<!-- {words}: end -->"

    def target(self, session: Session, work: str, peer: str) -> float | None:
        """Returns the ratio that we want to reach, None without a target."""
        return self.targets.get((work, session.model, session.precision, peer))


CPU_INFO = Path("/proc/cpuinfo")


def level_here(name: str, cpu_info: Path = CPU_INFO) -> Level:
    """Returns a level as it is run on this machine: engines are held to AVX2 only where there is
    more, since some of their models do not run under a cap."""
    level = LEVELS[name]
    if level.variables and cpu_info.is_file() and "avx512f" not in cpu_info.read_text():
        note = "\n\nThe machine has AVX2 and no AVX-512, so that no engine had to be held to it."
        return replace(level, variables={}, note=note)
    return level


LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        "best": Level(name="", targets=BEST_TARGETS),
        "avx2": Level(
            name="avx2",
            targets=AVX2_TARGETS,
            arguments=("--level", "avx2"),
            variables={"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
            note="\n\nHeld to AVX2: mmdeploy_llm and llama.cpp by their compilers' flags, torch by "
            "ATEN_CPU_CAPABILITY, oneDNN in torch and OpenVINO by ONEDNN_MAX_CPU_ISA.",
        ),
    }
)
