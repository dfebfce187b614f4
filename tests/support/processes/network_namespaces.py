"""Network namespaces, and a router between them that passes only what it is told to.

The namespaces have no names, and use none of the machine's own interfaces. A namespace lives as
long as its processes, and these end with us, however we end, so nothing can be left behind.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

PROGRAMS = ("unshare", "nsenter", "setpriv", "mount", "chroot", "ip", "nft")
COMMAND_SECONDS = 60
# Addresses of TEST-NET-1, which is not in use; a namespace's only neighbour is the router.
_ADDRESSES = "192.0.2.{}"
_MOST = 254
_ROUTER = "169.254.1.1"
_CLONE_NEWNET = 0x40000000
# Commands to find out if the machine permits what we need, each run in new namespaces. They do not
# use our own code, whose faults must fail tests instead of skipping them.
_PROBES = (
    ("mount", "-t", "tmpfs", "tmpfs", "/tmp"),
    ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"),
    ("ip", "link", "add", "one", "type", "veth", "peer", "name", "other"),
    (
        "nft",
        "add table inet probe;"
        "add chain inet probe forward { type filter hook forward priority 0; };"
        "add rule inet probe forward ct state established accept",
    ),
)
# Prefix of a command, so that it ends with the thread that started it.
_TETHER = ("setpriv", "--pdeathsig=KILL")
_LIBC = ctypes.CDLL(None, use_errno=True)

Command = Sequence[str | Path]


class Passage(NamedTuple):
    """A connection that may be opened, by addresses."""

    source: str
    destination: str
    protocol: str
    port: int


class Namespace:
    """A new network namespace with a mount namespace.

    Attributes:
        address: of its only interface; "" until it has joined a router.

    Args:
        mounts: commands that change the file system for its processes only.
        root: root folder of its processes, after the mounts.
        folder: working directory in that root.
    """

    def __init__(
        self, mounts: Sequence[Command] = (), root: Path = Path("/"), folder: str = "/"
    ) -> None:
        self.address = ""
        begin = 'cd "$1" && echo begun && exec cat'
        holder: Command = ("chroot", root, "sh", "-c", begin, "sh", folder)
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-euc", script((*mounts, ("exec", *holder)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():
            said = self._holder.stderr.read().decode()
            self.end()
            raise OSError(f"no namespace: {said}")

    @property
    def id(self) -> int:
        """Pid of the process that holds it."""
        return self._holder.pid

    def run(self, *command: str | Path, given: str = "") -> str:
        """The output of a command in it, with our own root and environment.

        Raises:
            OSError: the command failed.
        """
        done = subprocess.run(
            ["nsenter", f"--target={self.id}", "--net", "--mount", *_TETHER, *command],
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr}")
        return done.stdout

    def start(
        self, command: Command, environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process in it, with the namespace's own root.

        Args:
            environment: the whole environment.
            log: for its output and its errors.
        """
        enter = shutil.which("nsenter")
        assert enter is not None
        into = (f"--target={self.id}", "--net", "--mount", "--root", "--wd")
        with log.open("ab") as file:
            return subprocess.Popen(
                [enter, *into, *_TETHER, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def socket(self, kind: socket.SocketKind) -> socket.socket:
        """A socket in this network that we can use."""

        def make() -> socket.socket:
            with open(f"/proc/{self.id}/ns/net") as file:
                if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.socket(socket.AF_INET, kind)

        # A thread can be in another network, and a socket stays in the network it was made in.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    def end(self) -> None:
        """Remove it. Everything started in it must have ended before."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()
        self._holder.kill()
        self._holder.wait()


class Router:
    """Joins namespaces. At first it lets everything pass."""

    def __init__(self) -> None:
        self._own = Namespace()
        self._own.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._joined = 0

    def join(self, namespace: Namespace) -> None:
        """Give a namespace an address, and a route to all others."""
        self._joined += 1
        assert self._joined <= _MOST
        address, port = _ADDRESSES.format(self._joined), f"port{self._joined}"
        self._ip(
            self._own,
            f"link add {port} type veth peer name eth0 netns {namespace.id}",
            f"address add {_ROUTER}/32 dev {port}",
            f"link set {port} up",
            f"route add {address}/32 dev {port}",
        )
        self._ip(
            namespace,
            "link set lo up",
            f"address add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add default via {_ROUTER} dev eth0 onlink",
        )
        namespace.address = address

    @staticmethod
    def _ip(namespace: Namespace, *lines: str) -> None:
        namespace.run("ip", "-batch", "-", given="\n".join(lines))

    def allow(self, passages: Iterable[Passage]) -> None:
        """Allow these passages, with their answers, and nothing else."""
        lines = [line for one in sorted(passages) for line in _rules(one)]
        self._nft(
            "add table inet edges",
            "add chain inet edges forward { type filter hook forward priority 0; policy drop; }",
            *(f"add rule inet edges forward {line} accept" for line in lines),
        )

    def allow_all(self) -> None:
        """Let everything pass."""
        self._nft()

    def _nft(self, *lines: str) -> None:
        self._own.run("nft", "--file", "-", given="\n".join(("flush ruleset", *lines)))

    def end(self) -> None:
        self._own.end()


def _rules(passage: Passage) -> Iterator[str]:
    """Rules for both directions, so that removing a passage ends its connections too."""
    source, destination, protocol, port = passage
    there = f"ip saddr {source} ip daddr {destination} {protocol} dport {port}"
    back = f"ip saddr {destination} ip daddr {source} {protocol} sport {port}"
    yield f"{there} ct state new,established"
    yield f"{back} ct state established"


def script(commands: Iterable[Command]) -> str:
    """A shell script that runs commands one after the other."""
    return "\n".join(shlex.join(map(str, command)) for command in commands)


def obstacle() -> str | None:
    """Why such a network is not possible here; None if it is."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        for command in _PROBES:
            subprocess.run(
                ["unshare", "--net", "--mount", *command],
                check=True,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
            )
    except subprocess.CalledProcessError as error:
        return f"not permitted: {shlex.join(error.cmd)}: {error.stderr.strip()}"
    return None
