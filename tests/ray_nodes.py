"""A Ray cluster of two nodes on this machine: prints its address, drops the second node at a line on standard input."""

import os
import sys
import tempfile

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's servers listen on loopback alone
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 2, "object_store_memory": 80 << 20}

head = {**SMALL, "node_ip_address": "127.0.0.1", "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
second = cluster.add_node(**SMALL, node_ip_address="127.0.0.2")  # of its own, so that drivers go to the first
print("address", cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    sys.stdin.readline()
cluster.shutdown()
