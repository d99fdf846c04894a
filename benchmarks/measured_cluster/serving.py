"""`hetero-kv serve --cluster` with another request router.

python -m benchmarks.measured_cluster.serving ROUTER [flags of hetero-kv serve]
"""

from __future__ import annotations

import sys

from benchmarks.measured_cluster.routers import router_of
from hetero_kv.server.checked_flags import checked
from hetero_kv.server.cluster.launch import serve_cluster
from hetero_kv.server.command import add_flags
from hetero_kv.server.plan import ServerPlan
from hetero_kv.settings.flags import FlagParser


def main(router: str, *words: str) -> int:
    """Serve until SIGTERM."""
    parser = FlagParser("hetero-kv serve", "")
    add_flags(parser)
    flags = parser.parse(words)
    found = checked(flags)
    assert found.cluster is not None
    return serve_cluster(ServerPlan.of(flags, found), found.cluster, router_of(router))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
