"""A real Ray cluster over hosts of the lab runs tasks on each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.lab.ray_nodes import RayCluster
from tests.lab.sample import long_only

DRIVER = """
import ray, socket
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init(log_to_driver=False)
group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
assert group.wait(30)
@ray.remote(num_cpus=1)
def where():
    return socket.gethostname()
places = [PlacementGroupSchedulingStrategy(group, number) for number in range(2)]
print(*ray.get([where.options(scheduling_strategy=place).remote() for place in places], timeout=30))
"""


@long_only("test_ray.py uses such a cluster")
def test_tasks_run_on_every_node(ray_cluster: Callable[..., RayCluster]) -> None:
    cluster = ray_cluster(2)
    done = cluster.run([sys.executable, "-c", DRIVER])
    assert sorted(done.stdout.split()) == ["node0", "node1"], done.stderr
    assert all(list(host.folder.glob("ray/session_*/logs/raylet.out")) for host in cluster.hosts)
