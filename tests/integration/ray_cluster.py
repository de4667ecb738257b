"""A Ray cluster of several nodes on this machine: each node processes of its own, to be killed.

Each node has a network namespace, thus an address and ports of its own, and a folder of its own; a
bridge joins them. That takes root on Linux, and `ip`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

START_SECONDS = 300.0
SUBNET = "10.213.97"  # of the bridge; .1 is this process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Node:
    """One node: `ray start --block` and all that it starts, in a namespace of its own."""

    def __init__(self, number: int, bridge: str, folder: str, *arguments: str) -> None:
        self.address = f"{SUBNET}.{number}"
        self.name = f"{bridge}-{number}"  # of the namespace, and of the link that leads there
        ip("netns", "add", self.name)
        ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.name, "master", bridge, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")
        environment = os.environ | {
            "RAY_AUTH_MODE": "disabled",  # it listens on the bridge alone
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",  # this machine's name is not the node's, unlike a pod's
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",  # a busy machine is slow to start it
        }
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the node
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", "ray.scripts.scripts",
             "start", "--block", f"--node-ip-address={self.address}",
             f"--temp-dir={folder}/{number}", "--object-store-memory=100000000", *arguments],
            env=environment, stdout=self.log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-3000:]

    def kill(self) -> None:
        """The machine is gone: no process of it is asked."""
        if self.process.poll() is None:
            self.process.kill()
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait()
        for device in (("link", "del", self.name), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*device)  # fails for a node that was killed before


class Cluster:
    """A head without CPUs and workers of one CPU each, as the rendered RayJob has them."""

    def __init__(self) -> None:
        self.bridge = f"r{os.getpid() % 100000}"
        try:
            ip("link", "add", self.bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("network namespaces take root on Linux, and `ip`")
        ip("addr", "add", f"{SUBNET}.1/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        self.folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # sockets take short paths only
        self.nodes: list[Node] = []
        self.workers: list[Node] = []

    def start(self, workers: int) -> None:
        self.head = self._node(
            "--head", "--num-cpus=0", "--port=6379", "--include-dashboard=true",
            "--dashboard-port=8265", "--dashboard-host=0.0.0.0",
        )  # fmt: skip
        self.dashboard = f"http://{self.head.address}:8265"
        self._wait_for_nodes(1)
        for _ in range(workers):
            self.add_worker()

    def _node(self, *arguments: str) -> Node:
        node = Node(len(self.nodes) + 2, self.bridge, self.folder, *arguments)
        self.nodes.append(node)
        return node

    def add_worker(self) -> None:
        """Start one and wait for it: a raylet gives its agents 15 seconds, so one at a time."""
        before = self.nodes_alive()
        self.workers.append(self._node(f"--address={self.head.address}:6379", "--num-cpus=1"))
        self._wait_for_nodes(before + 1)

    def lose_worker(self, index: int) -> None:
        self.workers.pop(index).kill()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()
        ip("link", "del", self.bridge)
        shutil.rmtree(self.folder, ignore_errors=True)

    def nodes_alive(self) -> int:
        """As the head knows them; 0 where it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.dashboard}/nodes?view=summary", timeout=10) as got:
                nodes = json.load(got)["data"]["summary"]
        except OSError:
            return 0
        return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)

    def _wait_for_nodes(self, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.nodes_alive() < count:
            node = self.nodes[-1]
            assert node.process.poll() is None, node.said()
            assert time.monotonic() < deadline, f"{count} nodes did not start"
            time.sleep(0.5)


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.start(workers)
        yield made
    finally:
        made.kill()
