"""Packages that serve a model which is built in too come first: they are installed as pip would
leave them, next to the built-in plugins, and load a tiny checkpoint."""

import logging
import sys

import pytest

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.errors import ConfigError, PluginConflictError
from mmdeploy_llm.hooks import PluginManager

GREEDY = SamplingParams(temperature=0, max_tokens=3)
# A name, an architecture, a class, one kind of media.
PACKAGE = """
import sys

@hookimpl
def provide_models():
    return [ModelSpec(name={family!r}, architectures=({architecture!r},), media={media!r},
                      factory=__name__ + ":Theirs")]

@hookimpl
def provide_media_processors():
    return [MediaProcessorSpec(name="acme-image", kind="image", models=({family!r},),
                               factory=__name__ + ":their_images")] if {media!r} else []

def Theirs(config):
    from {module} import {architecture} as Base
    made = type("Theirs", (Base,), {{}})(config)
    made.of_package = sys.modules[__name__]
    return made

def their_images(checkpoint, options):
    from mmdeploy_llm_plugins.internvl.image import InternVLImageProcessor
    return type("TheirImages", (InternVLImageProcessor,), {{}})(checkpoint, options)
"""
PHI = ("phi3", "Phi3ForCausalLM", "mmdeploy_llm_plugins.phi.text", ())
GEMMA = ("gemma2", "Gemma2ForCausalLM", "mmdeploy_llm_plugins.gemma.text", ())
INTERNVL = (
    "internvl",
    "InternVLForConditionalGeneration",
    "mmdeploy_llm_plugins.internvl.model",
    ("image",),
)


@pytest.fixture
def install(tmp_path, monkeypatch, load_file):
    """install(name, case): a package whose plugin has this name."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = load_file("hooks/conftest.py").Site(folder)

    def write(name, case, package="acme-llm"):
        family, architecture, module, media = case
        source = PACKAGE.format(
            family=family,
            architecture=architecture,
            module=module,
            media=media,
        )
        if architecture == "Gemma2ForCausalLM":
            source = source.replace("import Gemma2ForCausalLM as", "import GemmaForCausalLM as")
        site.install(name, source, package=package)

    yield write
    for module in site.modules:
        sys.modules.pop(module, None)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if "comes from" in record.getMessage()]


@pytest.mark.parametrize(
    ("name", "case", "folder"),
    [
        ("acme", PHI, "phi3"),
        pytest.param("phi", PHI, "phi3", marks=pytest.mark.full),
        pytest.param("acme", GEMMA, "gemma2", marks=pytest.mark.full),
        pytest.param("acme", INTERNVL, "internvl", marks=pytest.mark.full),
    ],
)
def test_the_package_serves_the_model(install, make_llm, tiny_folder, caplog, name, case, folder):
    """Also where its plugin has the name of the built-in one; one line says so."""
    install(name, case)
    with caplog.at_level(logging.WARNING):
        llm, _ = make_llm(tiny_folder(folder))
    spec = llm.plugins.model_for([case[1]])
    assert llm.plugins.origin(spec).distribution == "acme-llm"
    (output,) = llm.generate("The quick brown fox", GREEDY, use_tqdm=False)
    assert output.error_code == 200
    (line,) = lines(caplog)
    built_in = f"mmdeploy-llm:{name}" if name == "phi" else case[2].split(".")[1]
    assert f"architecture {case[1]!r} comes from plugin {name!r} (acme-llm 1.0)" in line
    assert f"use={{{case[1]!r}: {built_in!r}}}" in line
    assert f"--use {case[1]}={built_in}" in line
    assert f"blocked_plugins=({name!r},)" in line
    if case[3]:
        images = llm.plugins.media_processor("image", spec.name, spec=spec)
        assert llm.plugins.owner(images) == name


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["acme", "internvl"])
def test_the_ways_that_the_line_names(install, caplog, name):
    install(name, INTERNVL)
    wanted, built_in = INTERNVL[1], "internvl" if name == "acme" else "mmdeploy-llm:internvl"
    plugins = PluginManager.load(use={wanted: built_in})
    spec = plugins.model_for([wanted])
    assert plugins.origin(spec).is_builtin
    for kind in ("image", "video"):  # of the same plugin: a model may not read others' tensors
        found = plugins.media_processor(kind, spec.name, spec=spec)
        assert plugins.origin(found).is_builtin
    with caplog.at_level(logging.WARNING):
        chosen = PluginManager.load(use={wanted: name})
        assert chosen.owner(chosen.model_for([wanted])) == name
    assert lines(caplog) == []  # who has chosen needs no line
    blocked = PluginManager.load(blocked=(f"acme-llm:{name}",))
    assert blocked.origin(blocked.model_for([wanted])).is_builtin
    exactly = PluginManager.load(plugins=(f"acme-llm:{name}",))
    assert [info.distribution for info in exactly.plugins] == ["acme-llm"]


def test_a_plain_name_means_both_of_the_same_name(install):
    install("phi", PHI)
    named = PluginManager.load(plugins=("phi",))
    names = {info.name for info in named.plugins}
    assert names == {"phi", "mmdeploy-llm:phi"}
    assert named.owner(named.model_for([PHI[1]])) == "phi"
    assert not {"phi", "mmdeploy-llm:phi"} & {
        info.name for info in PluginManager.load(blocked=("phi",)).plugins
    }


def test_two_packages_conflict(install):
    install("one", PHI, package="one-llm")
    install("two", PHI, package="two-llm")
    with pytest.raises(PluginConflictError, match=r"'one'.*'two'.*--use Phi3ForCausalLM=one"):
        PluginManager.load().model_for([PHI[1]])
    chosen = PluginManager.load(use={PHI[1]: "two"})
    assert chosen.owner(chosen.model_for([PHI[1]])) == "two"


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({PHI[1]: "acne"}, r"no loaded plugin is named 'acne'.*; did you mean 'acme'\?"),
        ({"Phi3ForCasualLM": "acme"}, r"does not provide .*; did you mean 'Phi3ForCausalLM'\?"),
        ({"qwen33": "reasoning"}, r"does not provide 'qwen33'; did you mean 'qwen3'\?"),
        (
            {"LlamaForCausalLM": "acme"},
            r"'acme' \(acme-llm 1.0\) does not provide 'Llama",
        ),
    ],
)
def test_a_wrong_choice(install, use, message):
    install("acme", PHI)
    with pytest.raises(ConfigError, match=message):
        PluginManager.load(use=use)


def test_a_choice_of_what_is_blocked_or_failed(install, tmp_path):
    install("acme", PHI)
    with pytest.raises(ConfigError, match=r"named 'acme'.* blocked_plugins: acme"):
        PluginManager.load(blocked=("acme",), use={PHI[1]: "acme"})
    (tmp_path / "site" / "site_acme_llm.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match=r"(?s)named 'acme'.*\n - 'acme' \(acme-llm\): import"):
        PluginManager.load(use={PHI[1]: "acme"})


def test_a_choice_for_another_model_is_told(caplog):
    plugins = PluginManager.load(use={"Phi3ForCausalLM": "phi"})
    plugins.model_for(["LlamaForCausalLM"])
    assert "'phi3forcausallm', which has no effect" in caplog.text


def test_any_model_may_be_chosen():
    plugins = PluginManager.load(use={"LlamaForCausalLM": "transformers_any"})
    assert plugins.owner(plugins.model_for(["LlamaForCausalLM"])) == "transformers_any"
