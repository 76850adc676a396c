"""Every way to fail while being loaded: caught, recorded, and no other plugin suffers."""

import logging
import subprocess
import sys

import pytest

from mmdeploy_llm.errors import (
    ModelNotSupportedError,
    PluginLoadError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import (
    MediaLimits,
    MediaRef,
    PluginManager,
    ReasoningParserSpec,
    hookimpl,
)

# source of a plugin, the phase in which it fails, a part of the error
BROKEN = {
    "bad import": ("import no_such_module", "import", "ModuleNotFoundError: No module named"),
    "syntax error": ("def f(:", "import", "SyntaxError"),
    "exit at import": ("import sys; sys.exit(3)", "import", "SystemExit: 3"),
    "assertion": ("assert False, f'see {object()}'", "import", "AssertionError: see <object obj"),
    "misspelt hook": (
        "@hookimpl\ndef provide_model(): return []",
        "register",
        "there is no hook 'provide_model'; did you mean 'provide_models'?",
    ),
    "bad argument": (
        "@hookimpl\ndef fetch_media(reference): return None",
        "register",
        "fetch_media takes ref, limits, yours has reference",
    ),
    "default value": (
        "@hookimpl\ndef fetch_media(ref, limits=None): return None",
        "register",
        "fetch_media has default values for limits; remove them",
    ),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef fetch_media(ref, limits): return (yield)",
        "register",
        "fetch_media is a hook wrapper",
    ),
    "no hooks": ("x = 1", "register", "it implements no hook; mark its functions"),
    "unmarked hook": (
        "def provide_models(): return []",
        "register",
        "mark provide_models with @hookimpl",
    ),
    "raising provider": (
        "@hookimpl\ndef provide_models(): raise OSError('disk')",
        "provide",
        "OSError: disk",
    ),
    "exiting provider": (
        "@hookimpl\ndef provide_models(): raise SystemExit",
        "provide",
        "SystemExit",
    ),
    "raising generator": (
        "@hookimpl\ndef provide_models():\n    yield from ()\n    raise OSError('disk')",
        "provide",
        "OSError: disk",
    ),
    "None": (
        "@hookimpl\ndef provide_models(): pass",
        "provide",
        "provide_models must return an iterable of ModelSpec, such as a list; got None",
    ),
    "bare spec": (
        "@hookimpl\ndef provide_reasoning_parsers():\n"
        "    return ReasoningParserSpec(name='x', factory='a:b')",
        "provide",
        "must return an iterable of ReasoningParserSpec",
    ),
    "wrong type": (
        "@hookimpl\ndef provide_models(): return [{'name': 'x'}]",
        "provide",
        "must return ModelSpec only; got {'name': 'x'} (dict)",
    ),
    "wrong spec": (
        "@hookimpl\ndef provide_models(): return [ReasoningParserSpec(name='x', factory='a:b')]",
        "provide",
        "must return ModelSpec only",
    ),
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("case", BROKEN)
def test_failure_is_recorded_and_others_load(site, caplog, model_plugin, case):
    source, phase, error = BROKEN[case]
    site.install("a-first", model_plugin("first", "First"))
    site.install("broken", source)
    site.install("z-last", model_plugin("last", "Last"))
    manager = PluginManager.load()

    assert [spec.name for spec in manager.models] == ["first", "last"]
    (failure,) = manager.failures
    assert (failure.plugin, failure.phase, failure.distribution) == ("broken", phase, "broken-llm")
    assert error in failure.error
    assert "0x" not in failure.error
    assert [plugin.name for plugin in manager.plugins] == ["a-first", "broken", "z-last"]
    assert manager.plugins[1].failures == (failure,)
    assert manager.plugins[1].provides == ()

    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "'broken' (broken-llm)" in warnings[0].getMessage()
    assert error in warnings[0].getMessage()

    with pytest.raises(ModelNotSupportedError) as missing:  # repeated to whoever misses something
        manager.model_for(["BrokenForCausalLM"])
    assert error in str(missing.value)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("case", BROKEN)
def test_strict_loading_raises_with_the_cause(site, caplog, model_plugin, case):
    source, phase, error = BROKEN[case]
    site.install("good", model_plugin())
    site.install("broken", source)
    with pytest.raises(PluginLoadError) as failed:
        PluginManager.load(plugins=("good", "broken"))
    assert f"plugin 'broken' (broken-llm 1.0) cannot be loaded: {phase}: " in str(failed.value)
    assert error in str(failed.value)
    assert failed.value.__cause__ is not None
    assert (
        PluginManager.load(plugins=("good",)).failures == ()
    )  # a broken neighbour does not matter


@pytest.mark.parametrize(
    "mistake",
    [
        "def on_step(statistics): pass",  # pluggy 1.6 would leave the plugin half registered
        "def on_stop(): pass",  # and any pluggy would leave this one
        "def on_step(stats=None): pass",
    ],
)
def test_broken_plugin_leaves_no_implementation_behind(site, mistake):
    fetch = "@hookimpl\ndef fetch_media(ref): return b'half registered'\n"
    site.install("broken", f"{fetch}@hookimpl\n{mistake}")
    manager = PluginManager.load()
    assert manager.failures[0].phase == "register"
    with pytest.raises(UnsupportedMediaError, match="Plugins tried: none"):
        manager.fetch_media(MediaRef(kind="image", uri="x"), MediaLimits())


def test_traceback_is_logged_at_debug_level(site, caplog):
    site.install("broken", "def f():\n    raise OSError('deep')\nf()")
    with caplog.at_level(logging.DEBUG, logger="mmdeploy_llm.hooks"):
        PluginManager.load()
    (record,) = [item for item in caplog.records if item.exc_info]
    assert record.levelno == logging.DEBUG
    assert record.exc_info[0] is OSError


def test_keyboard_interrupt_is_not_caught(site):
    site.install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginManager.load()


def test_failing_provider_costs_only_its_own_hook(site):
    site.install(
        "half",
        """
        @hookimpl
        def provide_models(): raise OSError("disk")
        @hookimpl
        def provide_reasoning_parsers():
            return [ReasoningParserSpec(name="half", factory="a:b")]
        @hookimpl
        def on_step(stats): pass
        """,
    )
    manager = PluginManager.load()
    assert [failure.phase for failure in manager.failures] == ["provide"]
    assert manager.plugins[0].provides == ("reasoning parser half", "hook on_step")


def test_providers_are_called_once(site):
    module = site.install(
        "counting",
        """
        calls = []
        @hookimpl
        def provide_models():
            calls.append(1)
            return []
        """,
    )
    manager = PluginManager.load()
    for _ in range(3):
        assert manager.models == ()
        assert manager.plugins[0].name == "counting"
    assert len(sys.modules[module].calls) == 1


def test_plugin_that_is_the_module_of_another(site, model_plugin):
    site.install("one", model_plugin(), module="site_shared")
    site.install("two", model_plugin(), module="site_shared")
    manager = PluginManager.load()
    (failure,) = manager.failures
    assert "it is the same object as plugin 'one' (one-llm 1.0), " in failure.error
    assert "site_shared.py: if both packages have a module of this name, rename" in failure.error
    assert len(manager.models) == 1


def test_entry_points_of_a_package_for_one_module_are_names_of_one_plugin(site, model_plugin):
    site.install("one", model_plugin(), package="acme-llm")
    file = site.folder / "acme_llm-1.0.dist-info" / "entry_points.txt"
    file.write_text(file.read_text() + "two = site_acme_llm\n")
    manager = PluginManager.load()
    assert [plugin.name for plugin in manager.plugins] == ["one"]
    assert manager.failures == ()
    for name in ("one", "two", "acme-llm:two"):
        assert len(PluginManager.load(plugins=(name,)).models) == 1
        assert PluginManager.load(blocked=(name,)).models == ()
        PluginManager.load(use={"AcmeForCausalLM": name})
    assert len(PluginManager.load(plugins=("one", "two")).models) == 1


def test_entry_point_may_name_an_object_in_a_module(site, model_plugin):
    module = site.install(
        "holder",
        "class Plugin:\n    @hookimpl\n    def provide_reasoning_parsers(self):\n"
        "        return [ReasoningParserSpec(name='p', factory='a:b')]\nplugin = Plugin()",
        entry="site_holder_llm:plugin",
    )
    manager = PluginManager.load()
    assert [spec.name for spec in manager.reasoning_parsers] == ["p"]
    assert manager.plugins[0].module == f"{module}:plugin"


def test_entry_point_that_names_nothing_possible(site):
    site.install("odd", "", entry="not a module!")
    manager = PluginManager.load()
    assert manager.failures[0].phase == "import"


def test_info_lists_everything_a_plugin_provides(site):
    site.install(
        "full",
        """
        @hookimpl
        def provide_models():
            return (ModelSpec(name=n, architectures=(n,), factory="a:b") for n in ("m1", "m2"))
        @hookimpl
        def provide_reasoning_parsers():
            return [ReasoningParserSpec(name="p", factory="a:b")]
        @hookimpl
        def provide_media_processors():
            return [MediaProcessorSpec(name="q", kind="image", factory="a:b")]
        @hookimpl
        def fetch_media(ref): return None
        """,
        version="3.2",
    )
    (info,) = PluginManager.load().plugins
    assert info.provides == (
        "model m1",
        "model m2",
        "reasoning parser p",
        "image processor q",
        "hook fetch_media",
    )
    assert (info.module, info.distribution, info.version) == ("site_full_llm", "full-llm", "3.2")


def test_blocked_plugin_is_not_imported(site, model_plugin):
    module = site.install("one", model_plugin())
    PluginManager.load(blocked=("one",))
    assert module not in sys.modules


def test_register_failure_raises_and_adds_nothing(make_plugin):
    spec = ReasoningParserSpec(name="p", factory="a:b")

    def broken():
        raise OSError("disk")

    manager = PluginManager()
    plugin = make_plugin(
        on_step=lambda stats: None,
        provide_models=broken,
        provide_reasoning_parsers=lambda: [spec],
    )
    with pytest.raises(
        PluginLoadError, match=r"plugin 'mine' \(registered in process\).*OSError: disk"
    ):
        manager.register(plugin, "mine")
    assert manager.plugins == ()
    assert manager.reasoning_parsers == ()
    assert manager._registry.impls("on_step") == []

    plugin.provide_models = hookimpl(lambda: [], specname="provide_models")
    manager.register(plugin, "mine")  # repaired, the same name is free
    assert manager.reasoning_parsers == (spec,)


def test_register_refuses_a_name_that_is_taken(make_plugin):
    manager = PluginManager()
    manager.register(make_plugin(provide_models=lambda: []), "mine")
    with pytest.raises(PluginLoadError, match="'mine' is loaded already"):
        manager.register(make_plugin(provide_models=lambda: []), "mine")
    assert len(manager.plugins) == 1


def test_optional_hook_of_another_version_is_let_through(make_plugin):
    plugin = make_plugin(provide_models=lambda: [])
    plugin.on_tuesday = hookimpl(lambda: None, specname="on_tuesday", optionalhook=True)
    manager = PluginManager()
    manager.register(plugin, "newer")
    assert manager.failures == ()


def test_installed_package_in_a_fresh_interpreter(site, model_plugin):
    """End to end: nothing patched, entry points found by Python itself, a broken neighbour."""
    site.install("fresh", model_plugin("fresh", "FreshForCausalLM"))
    site.install("broken", "import sys; sys.exit('no')")
    code = (
        "from mmdeploy_llm.hooks import PluginManager\n"
        "manager = PluginManager.load()\n"
        "print(manager.owner(manager.model_for(['FreshForCausalLM'])))\n"
        "print([failure.error for failure in manager.failures if failure.plugin == 'broken'])\n"
    )
    path = f"import sys; sys.path.append({str(site.folder)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", path + code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines() == ["fresh", "['SystemExit: no']"]
    assert "plugin 'broken' (broken-llm): import: SystemExit: no; it is not loaded" in done.stderr


def test_listing_the_installed_plugins_imports_no_torch():
    code = (
        "import sys\n"
        "from mmdeploy_llm.hooks import PluginManager\n"
        "manager = PluginManager.load()\n"
        "assert not manager.failures, manager.failures\n"
        "print(sorted({'torch', 'transformers', 'PIL', 'av'} & set(sys.modules)))\n"
        "print(sorted(info.name for info in manager.plugins))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    heavy, names = done.stdout.splitlines()
    assert heavy == "[]"
    assert set(eval(names)) >= {"ernie", "qwen", "reasoning", "sources"}
