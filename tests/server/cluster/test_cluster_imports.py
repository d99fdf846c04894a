"""A server of one process needs no Ray."""

from __future__ import annotations

from tests.test_documentation import ROOT, imported

CLUSTER = ROOT / "hetero_kv" / "server" / "cluster"


def users_of(*packages):
    """The modules of hetero_kv that import one of these when they run, or one of their functions does."""
    found = {}
    for path in (ROOT / "hetero_kv").rglob("*.py"):
        named = {name for name in imported(path) if any(f"{name}.".startswith(f"{each}.") for each in packages)}
        if named:
            found[path] = named
    return found


def test_ray_is_imported_by_the_package_of_clusters_alone():
    using = users_of("ray")
    assert {path.parent for path in using} == {CLUSTER}
    needing = [f"hetero_kv.server.cluster.{path.stem}" for path in using]
    # The command imports it once --cluster is given.
    outside = [path for path in users_of(*needing) if path.parent != CLUSTER]
    assert outside == [ROOT / "hetero_kv" / "server" / "command.py"]
