"""A Kubernetes control plane as processes: nodes are not real, and KWOK simulates pods."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster.manifests import tool
from tests.support.processes.ports import free_port
from tests.support.repository import ROOT

PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kwok",
    "kubectl",
    "kustomize",
    "openssl",
)
CUSTOM_RESOURCES = ROOT / ".cache" / "crds"
# KWOK's rules for nodes and pods: alive, and ready at once.
STAGES = ROOT / ".cache" / "stages"
START_SECONDS = 120
STOP_SECONDS = 20
COMMAND_SECONDS = 120


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Attributes:
        code: exit status.
        output: standard output.
        errors: standard error, with warnings of the API server.
    """

    code: int
    output: str
    errors: str


class ControlPlane:
    """A running API server, used through `kubectl`.

    Args:
        kubeconfig: names the server and an administrator.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> Answer:
        """Run a command, with something on its standard input."""
        program = tool("kubectl")
        assert program is not None
        done = subprocess.run(
            [program, f"--kubeconfig={self._kubeconfig}", *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}"
        return Answer(done.returncode, done.stdout, done.stderr)

    def get(self, *what: str) -> Any:
        """Objects from the API server: a single one, or the items of a list."""
        found = json.loads(self.kubectl("get", *what, "--output=json").output)
        return found.get("items", found)

    def create(self, *documents: Mapping[str, Any]) -> None:
        self.kubectl("create", "--filename=-", given=yaml.safe_dump_all(documents))


def missing() -> list[str]:
    """Programs and folders that a control plane needs and that are missing."""
    folders = [folder.name for folder in (CUSTOM_RESOURCES, STAGES) if not folder.is_dir()]
    return [name for name in PROGRAMS if tool(name) is None] + folders


def wait(reason: str, holds: Callable[[], bool], seconds: float, pause: float = 0.2) -> None:
    """Wait until something holds, for a bounded time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {reason}"
        time.sleep(pause)


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Start a control plane, wait until it takes pods, and stop it at the end.

    Args:
        folder: for its data and its logs.
    """
    etcd, api = free_port(), free_port()
    token = secrets.token_hex(16)
    kubeconfig = _write_access(folder, api, token)
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    plane = ControlPlane(kubeconfig)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(_start(folder, "etcd", *_etcd_flags(folder, etcd)))
        processes.append(_start(folder, "kube-apiserver", *_api_flags(folder, etcd, api, key)))

        def ready() -> bool:
            assert all(one.poll() is None for one in processes), f"see {folder}"
            return plane.kubectl("get", "--raw=/readyz", check=False).output == "ok"

        wait("the API server is ready", ready, START_SECONDS, pause=1)
        for name, flags in _controllers(kubeconfig, key):
            processes.append(_start(folder, name, *flags))
        _define_custom_resources(plane)
        yield plane
    finally:
        _stop(processes)


def _write_access(folder: Path, api: int, token: str) -> Path:
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    server = {"server": f"https://127.0.0.1:{api}", "insecure-skip-tls-verify": True}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "admin"}}],
        "current-context": "local",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def _etcd_flags(folder: Path, port: int) -> Sequence[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    return (
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        # Only test data could be lost if the machine fails.
        "--unsafe-no-fsync",
    )


def _api_flags(folder: Path, etcd: int, port: int, key: Path) -> Sequence[str]:
    return (
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24",
        # WatchList needs a watch's progress, which the wheel's etcd, 3.5.1, cannot report.
        "--feature-gates=WatchList=false",
    )


def _controllers(kubeconfig: Path, key: Path) -> Iterator[tuple[str, Sequence[str]]]:
    access = f"--kubeconfig={kubeconfig}"
    alone = (access, "--leader-elect=false", "--bind-address=127.0.0.1")
    yield (
        "kube-controller-manager",
        (
            *alone,
            f"--secure-port={free_port()}",
            f"--cert-dir={kubeconfig.parent / 'controllers'}",
            f"--service-account-private-key-file={key}",
            "--horizontal-pod-autoscaler-sync-period=2s",
        ),
    )
    scheduler = (f"--secure-port={free_port()}", f"--cert-dir={kubeconfig.parent / 'scheduler'}")
    yield "kube-scheduler", (*alone, *scheduler)
    yield (
        "kwok",
        (
            access,
            "--manage-all-nodes=true",
            f"--server-address=127.0.0.1:{free_port()}",
            "--node-lease-duration-seconds=40",
            *(f"--config={path}" for path in sorted(STAGES.glob("*.yaml"))),
        ),
    )


def _start(folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
    program = tool(name)
    assert program is not None
    # HOME: so that the user's own configuration is not read.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "KUBE_FEATURE_WatchListClient": "false",
    }
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [program, *flags], stdout=log, stderr=log, cwd=folder, env=environment
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _define_custom_resources(plane: ControlPlane) -> None:
    # Server-side, since they are too large for kubectl's annotation.
    plane.kubectl("apply", "--server-side", f"--filename={CUSTOM_RESOURCES}")
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
