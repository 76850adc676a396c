import logging
import types
from importlib import metadata

import pytest

from mmdeploy_llm.errors import ConfigError, PluginLoadError
from mmdeploy_llm.hooks import API_VERSION, PluginManager
from mmdeploy_llm.hooks.discovery import Discovery, discover, select
from mmdeploy_llm.hooks.versions import api_problems

NOTHING = ""


def names(plugins):
    return [plugin.origin.name for plugin in plugins]


def test_plugins_come_sorted_by_name_with_their_package(site):
    for name in ("zeta", "alpha", "mid"):
        site.install(name, NOTHING, version="2.1")
    found = discover()
    assert names(found.plugins) == ["alpha", "mid", "zeta"]
    assert found.failures == ()
    assert str(found.plugins[0].origin) == "plugin 'alpha' (alpha-llm 2.1)"
    assert found.plugins[0].origin.module == "site_alpha_llm"


def test_discovery_imports_nothing(site):
    site.install("bad", "raise RuntimeError('imported')")
    assert names(discover().plugins) == ["bad"]


def test_malformed_entry_points_of_one_package_hide_no_other(site):
    site.install("good", NOTHING)
    site.install("bad", NOTHING)
    file = site.folder / "bad_llm-1.0.dist-info" / "entry_points.txt"
    file.write_text("[mmdeploy_llm]\nnot an entry point\n")
    found = discover()
    assert names(found.plugins) == ["good"]
    (failure,) = found.failures
    assert (failure.plugin, failure.phase) == ("bad-llm", "discover")


def test_package_without_a_name_is_a_failure(site):
    site.install("good", NOTHING)
    site.install("bad", NOTHING)
    (site.folder / "bad_llm-1.0.dist-info" / "METADATA").unlink()
    found = discover()
    assert names(found.plugins) == ["good"]
    assert [failure.phase for failure in found.failures] == ["discover"]
    assert str(site.folder) in found.failures[0].plugin


def test_package_whose_metadata_cannot_be_read_at_all(site, monkeypatch):
    class Unreadable(metadata.Distribution):
        def read_text(self, filename):
            raise OSError("disk")

        def locate_file(self, path):
            return f"/somewhere/{path}"

    monkeypatch.setattr("importlib.metadata.distributions", lambda: [Unreadable()])
    (failure,) = discover().failures
    assert (failure.plugin, failure.error) == ("a package in /somewhere/", "OSError: disk")


def test_packages_without_plugins_are_passed_over(site):
    site.install("other", NOTHING)
    file = site.folder / "other_llm-1.0.dist-info" / "entry_points.txt"
    file.write_text("[console_scripts]\nother = other:main\n")
    assert discover() == Discovery(plugins=(), failures=())


def test_failures_of_discovery_are_reported_at_load(site, caplog, model_plugin):
    site.install("good", model_plugin())
    site.install("bad", NOTHING)
    (site.folder / "bad_llm-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    manager = PluginManager.load()
    assert [failure.phase for failure in manager.failures] == ["discover"]
    assert len(caplog.records) == 1
    assert [info.name for info in manager.plugins] == ["good"]


def test_two_packages_with_one_plugin_name(site):
    site.install("same", NOTHING, package="b-package")
    site.install("Same", NOTHING, package="a-package")
    found = discover()
    assert [plugin.origin.distribution for plugin in found.plugins] == ["a-package"]
    (failure,) = found.failures
    assert failure.distribution == "b-package"
    assert "taken by plugin 'Same' (a-package 1.0)" in failure.error


def test_our_package_keeps_its_plugin_names(site):
    """A package of somebody's may have the same name: both load, since an upgrade may have brought
    ours."""
    site.install("ernie", NOTHING, package="a-package")
    site.install("ernie", NOTHING, package="Mmdeploy.LLM")
    found = discover()
    assert found.failures == ()
    names = {p.origin.name: p.origin.is_builtin for p in found.plugins}
    assert names == {"ernie": False, "mmdeploy-llm:ernie": True}
    assert [p.origin.is_builtin for p in select(found.plugins, ("mmdeploy-llm:ernie",), ())] == [1]
    assert len(select(found.plugins, ("ernie",), ())) == 2
    assert select(found.plugins, None, ("ernie",)) == ()


def test_what_is_built_in_is_known_by_its_package(site):
    """Not by the names of modules or plugins, which anybody may use."""
    site.install("phi", NOTHING, package="acme", module="mmdeploy_llm_phi")
    site.install("own", NOTHING, package="mmdeploy_llm")
    found = {p.origin.name: p.origin.is_builtin for p in discover().plugins}
    assert found == {"phi": False, "own": True}


def test_the_metadata_of_a_checkout_hide_nothing(site):
    """The egg-info folder in a checkout, first on the path, is the same package as the installed
    one."""
    site.install("own", NOTHING, package="mmdeploy-llm")
    info = site.folder / "mmdeploy_llm.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mmdeploy-llm\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[mmdeploy_llm]\nown = site_mmdeploy_llm\n")
    (plugin,) = discover().plugins
    assert plugin.origin.is_builtin


def test_older_copy_later_on_the_path_is_not_seen(site):
    site.install("acme", NOTHING, version="1.0")
    site.install("acme", NOTHING, version="1.1", module="site_acme_new")
    found = discover()
    assert len(found.plugins) == 1
    assert found.failures == ()


def test_select_all_without_the_blocked(site):
    for name in ("a_b", "c", "d"):
        site.install(name, NOTHING)
    installed = discover().plugins
    assert names(select(installed, None, ())) == ["a_b", "c", "d"]
    assert names(select(installed, None, ("A-B", "d"))) == ["c"]
    assert names(select(installed, ("d", "a-b"), ())) == ["a_b", "d"]
    assert names(select(installed, (), ())) == []


def test_select_missing_plugin_says_what_is_installed(site):
    site.install("ernie", NOTHING)
    with pytest.raises(PluginLoadError, match=r"'ernei'; did you mean 'ernie'\?; installed: ernie"):
        select(discover().plugins, ("ernei",), ())


def test_select_plugin_that_is_also_blocked(site):
    site.install("ernie", NOTHING)
    with pytest.raises(ConfigError, match="'ernie' is in plugins and in blocked_plugins"):
        select(discover().plugins, ("ernie",), ("Ernie",))


def test_unknown_blocked_name_is_warned_about(site, caplog):
    site.install("ernie", NOTHING)
    select(discover().plugins, None, ("erni",))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'erni'; did you mean 'ernie'?" in record.getMessage()


@pytest.mark.parametrize(
    ("requires", "is_told"),
    [
        ("mmdeploy-llm>=999", True),
        ("mmdeploy_llm <0.0.1", True),
        ("mmdeploy-llm>=0.0.1", False),
        ("mmdeploy-llm", False),
        ("mmdeploy-llm>=999; python_version < '3'", False),
        ("mmdeploy-llm>=999; extra == 'later'", False),
        ("something-else>=999", False),
    ],
)
def test_version_mismatch(site, requires, is_told):
    site.install("acme", NOTHING, version="7.5", requires=[requires])
    problems = discover().plugins[0].problems
    assert len(problems) == is_told
    if is_told:
        assert "it requires mmdeploy" in problems[0]
        assert f"mmdeploy-llm {metadata.version('mmdeploy-llm')} is installed" in problems[0]


def test_a_package_that_holds_up_every_start_is_told(site, caplog, monkeypatch, model_plugin):
    monkeypatch.setattr("mmdeploy_llm.hooks.registry.MAX_IMPORT_SECONDS", 0.0)
    site.install("slow", f"import time; time.sleep(0.06)\n{model_plugin()}")
    (told,) = PluginManager.load().plugins[-1].warnings
    assert "its import took " in told
    assert told in caplog.text


def test_a_development_version_of_ours_counts_as_a_version(site, monkeypatch):
    site.install("acme", NOTHING, requires=["mmdeploy-llm>=0.5"])
    plugin = discover().plugins[0]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0.dev3")
    assert plugin.problems == ()


def test_version_mismatch_is_reported_at_load_and_the_plugin_works(site, caplog, model_plugin):
    source = "MMDEPLOY_LLM_API = (99, 0)\n" + model_plugin()
    site.install("acme", source, requires=["mmdeploy-llm>=999"])
    manager = PluginManager.load()
    assert [spec.name for spec in manager.models] == ["acme"]
    assert manager.failures == ()
    assert len(caplog.records) == 2
    requires, written = manager.plugins[0].warnings
    assert requires.startswith("it requires mmdeploy-llm>=999")
    assert written.startswith("it was written for version 99.0 of the plugin API, and this is 1.")
    assert "plugin 'acme' (acme-llm 1.0): it requires" in caplog.text


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (None, None),
        (API_VERSION, None),
        ((API_VERSION[0], 0), None),
        (list(API_VERSION), None),
        ((API_VERSION[0], API_VERSION[1] + 1), "install a newer mmdeploy-llm"),
        ((API_VERSION[0] - 1, 99), "in which names were removed: install a newer version of the"),
        ("1.0", "must be two numbers such as"),
        ((1, "x"), "must be two numbers such as"),
        (1, "must be two numbers such as"),
    ],
)
def test_the_version_that_a_plugin_was_written_for(written, problem):
    found = api_problems(types.SimpleNamespace(MMDEPLOY_LLM_API=written))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


@pytest.mark.parametrize("named", [None, ("acme",)])
def test_a_version_that_does_not_fit_is_told_with_the_failure(site, named):
    """Both faults are told: the second is often the reason of the first."""
    site.install("acme", "from mmdeploy_llm.hooks import Later", requires=["mmdeploy-llm>=999"])
    try:
        text = PluginManager.load(plugins=named).failures[0].error
    except PluginLoadError as error:
        text = str(error)
    assert "cannot import name 'Later'" in text
    assert "it requires mmdeploy-llm>=999" in text


def test_unreadable_requirement_is_told(site):
    site.install("acme", NOTHING, requires=["mmdeploy-llm >>> 1"])
    assert "cannot be read" in discover().plugins[0].problems[0]


def test_without_an_installed_version_of_ours_nothing_is_compared(site, monkeypatch):
    site.install("acme", NOTHING, requires=["mmdeploy-llm>=999"])
    plugin = discover().plugins[0]

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert plugin.problems == ()
