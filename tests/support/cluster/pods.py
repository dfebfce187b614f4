"""The manifests' pods as processes in network namespaces, with all other endpoints around them.

This does what a kubelet, a name server and a network plugin do for a pod: it provides its image's
files and variables, the pod's own variables, names of ready pods, and the edges that the
NetworkPolicies allow. All names are headless: the public Service has its pod's address. The user
that a process runs as is not modelled.
"""

from __future__ import annotations

import asyncio
import errno
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dns.message

from tests.support.cluster.containerfile import Image, image
from tests.support.cluster.endpoints import endpoints
from tests.support.cluster.manifests import SERVICES, Manifests
from tests.support.cluster.network_policy import Edge, allowed_edges
from tests.support.processes.network_namespaces import Command, Namespace, Passage, Router
from tests.support.processes.services import READY_SECONDS
from tests.support.repository import ROOT
from tests.support.wire.names import Names, serve_names

DOMAIN = "cluster.local"
# An allowed connection is answered by the kernel itself; a filtered one is never answered.
ANSWER_SECONDS = 1.0
END_SECONDS = 10
# Time limit of one probe; between probes we check that the service still runs.
PROBE_SECONDS = 5
_FIELDS = {"metadata.labels['topology.kubernetes.io/zone']": "a"}
_KINDS = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM}


class Pods:
    """One pod of each service, and a network namespace for every other endpoint.

    Attributes:
        manifests: that the pods are made from.
        pairs: for each endpoint and each port of another one, the port's protocol and number.
        edges: the pairs that the NetworkPolicies allow.
        namespaces: of all endpoints, by name.
        processes: of the services.

    Args:
        folder: for roots and logs.
        resources: stops everything that is started here.
    """

    def __init__(self, manifests: Manifests, folder: Path, resources: ExitStack) -> None:
        self.manifests = manifests
        self._folder = folder
        self._resources = resources
        self._ends = {end.name: end for end in endpoints(manifests)}
        allowed = allowed_edges(manifests.policies(), list(self._ends.values()))
        # Policies do not apply between a pod and itself.
        self.pairs = {
            (source, target.name, port): where
            for source in self._ends
            for target in self._ends.values()
            for port, where in target.ports.items()
            if source != target.name
        }
        self.edges = allowed & set(self.pairs)
        self._router = Router()
        resources.callback(self._router.end)
        self.namespaces: dict[str, Namespace] = {}
        for name in self._ends:
            self.namespaces[name] = self._join(name)
        self._names = self._serve_names()
        self._listen()
        self._allow(self.edges)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _join(self, name: str) -> Namespace:
        folder = self._folder / name
        folder.mkdir()
        files = {file: folder / file for file in ("resolv.conf", "hosts")}
        for path in files.values():
            path.touch()
        if name in SERVICES:
            own, root = image(name), folder / "root"
            root.mkdir()
            namespace = Namespace([*_root(root, own), *_etc(root, files)], root, own.folder)
        else:
            namespace = Namespace([*_etc(Path("/"), files)])
        self._resources.callback(namespace.end)
        self._router.join(namespace)
        files["hosts"].write_text(f"127.0.0.1 localhost\n{namespace.address} {name}-0\n")
        return namespace

    def _serve_names(self) -> Names:
        """The cluster's name server, used by all endpoints; it has no names yet."""
        server = self.namespaces["dns"]
        listener = server.socket(socket.SOCK_DGRAM)
        listener.bind((server.address, 53))
        for name, end in self._ends.items():
            domains = f"{end.namespace or 'default'}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
            (self._folder / name / "resolv.conf").write_text(
                f"search {domains}\nnameserver {server.address}\noptions ndots:5\n"
            )
        return self._resources.enter_context(_serving(listener))

    def _listen(self) -> None:
        """Listen on every port that is not a service's own."""
        for name, end in self._ends.items():
            for port, (protocol, number) in end.ports.items():
                if protocol == "TCP" and (name not in SERVICES or port == "other"):
                    namespace = self.namespaces[name]
                    listener = self._resources.enter_context(namespace.socket(_KINDS[protocol]))
                    listener.bind((namespace.address, number))
                    listener.listen()

    def _allow(self, edges: Collection[Edge]) -> None:
        """Allow these edges, and no others."""
        self._router.allow(
            Passage(
                self.namespaces[edge[0]].address,
                self.namespaces[edge[1]].address,
                self.pairs[edge][0].lower(),
                self.pairs[edge][1],
            )
            for edge in edges
        )

    @contextmanager
    def allowing(self, edges: Collection[Edge]) -> Iterator[None]:
        """Allow these edges instead, within the context."""
        self._allow(edges)
        try:
            yield
        finally:
            self._allow(self.edges)

    @contextmanager
    def allowing_all(self) -> Iterator[None]:
        """Filter nothing within the context, as without a network plugin for policies."""
        self._router.allow_all()
        try:
            yield
        finally:
            self._allow(self.edges)

    def connect(self, source: str, target: str, port: str) -> socket.socket:
        """A connection from one endpoint to another."""
        protocol, number = self.pairs[source, target, port]
        connection = self.namespaces[source].socket(_KINDS[protocol])
        connection.settimeout(END_SECONDS)
        connection.connect((self.namespaces[target].address, number))
        return connection

    def start(self) -> None:
        """Start the services, and wait until each passes its startup probe."""
        for service in SERVICES:
            own, variables = image(service), self.container_environment(service)
            process = self.namespaces[service].start(
                own.entrypoint, {**own.environment, **variables}, self._log(service)
            )
            self._resources.callback(process.wait, END_SECONDS)
            self._resources.callback(process.kill)
            self.processes[service] = process
        for service in SERVICES:
            self._wait_ready(service)
            (namespace,) = self.manifests.all("Namespace")
            name = f"{service}.{namespace}.svc.{DOMAIN}"
            self._names.records[name] = [self.namespaces[service].address]

    def container_environment(self, service: str) -> dict[str, str]:
        """The variables that the manifests give to a service, filled in as by its kubelet."""
        return self.manifests.environment(service, {"metadata.name": f"{service}-0", **_FIELDS})

    def _wait_ready(self, service: str) -> None:
        """Probe from within the pod, since a node's probes pass any policy."""
        _, container = self.manifests.containers()[service]
        probe, namespace = container["startupProbe"]["grpc"], self.namespaces[service]
        asked = (f"{namespace.address}:{probe['port']}", probe["service"], str(PROBE_SECONDS))
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                namespace.run(sys.executable, "-m", "tests.support.processes.probe", *asked)
                return
            except OSError as error:
                if self.processes[service].poll() is not None or time.monotonic() > deadline:
                    said = f"{service} is not ready: {self.log(service)}"
                    raise AssertionError(said) from error

    def _log(self, service: str) -> Path:
        return self._folder / f"{service}.log"

    def log(self, service: str) -> str:
        """A service's log."""
        return self._log(service).read_text()

    def reached(self) -> set[Edge]:
        """The edges that are answered when every endpoint contacts every other one at once.

        Raises:
            OSError: a port was reached, but nothing listens there.
        """
        query = dns.message.make_query("nobody.", "A").to_wire()
        answered: set[Edge] = set()
        with ExitStack() as sockets:
            waiting = sockets.enter_context(selectors.DefaultSelector())
            for edge, (protocol, number) in self.pairs.items():
                source, target = (self.namespaces[name] for name in edge[:2])
                asking = sockets.enter_context(source.socket(_KINDS[protocol]))
                asking.setblocking(False)
                begun = asking.connect_ex((target.address, number))
                assert begun in (0, errno.EINPROGRESS), (edge, begun)
                if protocol == "UDP":
                    asking.send(query)
                event = selectors.EVENT_READ if protocol == "UDP" else selectors.EVENT_WRITE
                waiting.register(asking, event, edge)
            deadline = time.monotonic() + ANSWER_SECONDS
            while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    assert isinstance(key.fileobj, socket.socket)
                    waiting.unregister(key.fileobj)
                    if error := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(error, f"{key.data}")
                    answered.add(key.data)
        return answered


def _root(root: Path, own: Image) -> Iterator[Command]:
    """A container's root: an image's files, read-only, and its own /tmp.

    The machine's folders serve as the image's base. The repository is hidden, so that only the
    files that the image copies are visible.
    """
    yield "mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", root
    hidden = {Path(path).parts[1] for path in (own.folder, own.python, "/tmp")}
    for entry in Path("/").iterdir():
        place = root / entry.name
        if entry.is_symlink():
            yield "ln", "-s", entry.readlink(), place
        elif entry.is_dir() and entry.name not in hidden:
            yield "mkdir", place
            yield "mount", "--rbind", entry, place
    if ROOT.parts[1] not in hidden:
        yield "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", _within(root, ROOT)
    # The emptyDir of the manifests.
    yield "mkdir", root / "tmp"
    yield "mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", root / "tmp"
    if Path(sys.base_prefix).parts[1] in hidden:
        yield from _bind(Path(sys.base_prefix), _within(root, Path(sys.base_prefix)))
    yield from _bind(Path(sys.prefix), _within(root, Path(own.python)))
    for path in own.copied:
        yield from _bind(ROOT / path, _within(root, Path(own.folder)) / path)
    yield "mount", "-o", "remount,bind,ro", root


def _etc(root: Path, files: dict[str, Path]) -> Iterator[Command]:
    for name, path in files.items():
        yield "mount", "--bind", path, _within(root, Path("/etc", name).resolve())


def _bind(source: Path, place: Path) -> Iterator[Command]:
    yield "mkdir", "-p", place
    yield "mount", "--bind", "-o", "ro", source, place


def _within(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


@contextmanager
def _serving(listener: socket.socket) -> Iterator[Names]:
    """A name server with its own event loop, so that it answers while a test waits."""
    loop, served, stop = asyncio.new_event_loop(), Future[Names](), asyncio.Event()

    async def serve() -> None:
        async with serve_names(listener) as names:
            served.set_result(names)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="names")
    thread.start()
    try:
        yield served.result(END_SECONDS)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(END_SECONDS)
        loop.close()
