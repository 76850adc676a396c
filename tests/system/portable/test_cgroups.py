"""The memory and the CPUs that control groups leave to a process, of versions 1 and 2, nested, in
containers that see their own group only; read from a file tree like Linux's."""

import pytest

from mmdeploy_llm.system.portable import cgroups, machine

GB = 10**9
V1_NONE = 9223372036854771712
V2 = "0::/pods/one/main\n"
V1 = "5:cpu,cpuacct:/pods/one\n4:memory:/pods/one\n1:name=systemd:/pods\n0::/\n"


@pytest.fixture
def tree(tmp_path):
    """Returns a function that writes files beneath a root, which it returns."""

    def write(groups, files):
        for name, text in {"proc/self/cgroup": groups, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def group(folder, limit, used, inactive=0, active=0):
    """Files of a group of version 2, in sys/fs/cgroup."""
    stat = f"anon 1\ninactive_anon 9\nactive_file {active}\ninactive_file {inactive}\nslab x"
    files = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


def group_v1(folder, limit, used, inactive=0):
    """The same of version 1, whose numbers of a group and of all in it differ."""
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {inactive}\ntotal_active_file 0"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}/{name}": text for name, text in files.items()}


def test_what_a_group_leaves_counts_no_pages_of_files(tree):
    root = tree(V2, group("pods/one/main", 8 * GB, 5 * GB, inactive=2 * GB, active=GB))
    assert cgroups.memory_left(root) == 6 * GB


def test_the_least_of_nested_groups_counts(tree):
    inner = group("pods/one/main", "max", GB)
    root = tree(V2, {**inner, **group("pods/one", 4 * GB, GB), **group("pods", 6 * GB, 5 * GB)})
    assert cgroups.memory_left(root) == GB


def test_a_bound_that_slows_a_group_down_counts_too(tree):
    high = {"sys/fs/cgroup/pods/one/main/memory.high": 2 * GB}
    root = tree(V2, {**group("pods/one/main", 8 * GB, GB), **high})
    assert cgroups.memory_left(root) == GB


@pytest.mark.parametrize("folder", ["pods/one", ""], ids=["of the host", "its own mount"])
def test_version_1(tree, folder):
    files = {**group_v1(folder, 3 * GB, 2 * GB, inactive=GB), **group_v1("pods", V1_NONE, 9 * GB)}
    assert cgroups.memory_left(tree(V1, files)) == 2 * GB


def test_a_container_that_is_told_another_path_sees_its_own_group(tree):
    root = tree("0::/../elsewhere\n", group("", 2 * GB, GB))
    assert cgroups.memory_left(root) == GB


def test_a_group_that_is_over_its_limit_leaves_nothing(tree):
    assert cgroups.memory_left(tree(V2, group("pods/one/main", GB, 2 * GB))) == 0


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("", {}),
        (V2, {}),
        (V2, group("pods/one/main", "max", GB)),
        (V2, group("pods/other", GB, 0)),
        ("nonsense\n", group("pods", GB, 0)),
        ("3:cpu:/pods\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": GB}),
    ],
)
def test_where_nothing_limits_the_memory(tree, groups, files):
    assert cgroups.memory_left(tree(groups, files)) is None


def test_without_files_nothing_is_known(tmp_path):
    assert cgroups.memory_left(tmp_path) is None
    assert cgroups.cpu_quota(tmp_path) is None


def test_the_quota_of_cpus(tree):
    nested = {"pods/one/cpu.max": "400000 100000", "pods/cpu.max": "150000 100000"}
    files = {f"sys/fs/cgroup/{name}": text for name, text in nested.items()}
    assert cgroups.cpu_quota(tree(V2, files)) == 1.5


@pytest.mark.parametrize(("quota", "expected"), [(250000, 2.5), (-1, None)])
def test_the_quota_of_cpus_in_version_1(tree, quota, expected):
    folder = "sys/fs/cgroup/cpu,cpuacct/pods/one"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": 100000}
    assert cgroups.cpu_quota(tree(V1, files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(2.5, 2), (0.2, 1), (64.0, 8), (None, 8)])
def test_the_number_of_cpus_is_what_machine_and_groups_both_leave(monkeypatch, quota, expected):
    monkeypatch.setattr(machine, "usable_cpus", lambda: tuple(range(8)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda root: quota)
    assert machine.num_cpus() == expected


@pytest.mark.parametrize("left", [0, 123, 2**60, None])
def test_free_ram_is_what_machine_and_groups_both_leave(monkeypatch, left):
    monkeypatch.setattr(machine, "memory_left", lambda: left)
    monkeypatch.setattr(machine, "_free_ram", lambda: 10**9)
    assert machine.free_ram() == (10**9 if left is None else min(left, 10**9))
