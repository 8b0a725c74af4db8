"""A cluster of two nodes on this machine, each with one CPU: as much as Ray can be tested with in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

OBJECT_STORE = 100 * 10**6


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` with two nodes of one CPU; nodes may be added and removed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'eogp[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False})
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
    yield cluster
    cluster.shutdown()
