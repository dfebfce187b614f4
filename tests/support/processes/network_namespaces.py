"""Network namespaces, and a router between them that lets pass what it is told and nothing else.

None of them has a name, and no interface is the machine's own. A namespace lives as long as its
processes, and these end with us, however we end: nothing can be left behind.
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
# Of TEST-NET-1, which nobody has; a namespace's only neighbour is the router.
_ADDRESSES = "192.0.2.{}"
_MOST = 254
_ROUTER = "169.254.1.1"
_CLONE_NEWNET = 0x40000000
# Each in namespaces of its own. They ask for what we use, and do not use our own code: what is
# wrong with that is a failure.
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
# In front of a command: it ends when the thread does that started it.
_TETHER = ("setpriv", "--pdeathsig=KILL")
_LIBC = ctypes.CDLL(None, use_errno=True)

Command = Sequence[str | Path]


class Passage(NamedTuple):
    """Who may begin to talk to whom, by address."""

    source: str
    destination: str
    protocol: str
    port: int


class Namespace:
    """A network namespace and a mount namespace of its own.

    Attributes:
        address: of its only interface; "" until a router has it.

    Args:
        mounts: commands that change what its processes find, and no other process does.
        root: that they have then.
        folder: in it, that they begin in.
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
        """Of the process that holds it."""
        return self._holder.pid

    def run(self, *command: str | Path, given: str = "") -> str:
        """What a command says in it, with our own root and environment.

        Raises:
            OSError: it failed.
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
        """A process that is wholly in it, with the root that it has.

        Args:
            environment: all of it.
            log: for what it says, its output and its errors.
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
        """A socket of this network, for us."""

        def make() -> socket.socket:
            with open(f"/proc/{self.id}/ns/net") as file:
                if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.socket(socket.AF_INET, kind)

        # The network is the thread's, and a socket stays where it was made.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    def end(self) -> None:
        """Let it go. What was started in it has to be ended before."""
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
        """Give a namespace an address, and a way to all others."""
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
        """Let these pass, with their answers, and nothing else any more."""
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
    """There, and back: a passage that is taken away ends its connections too."""
    source, destination, protocol, port = passage
    there = f"ip saddr {source} ip daddr {destination} {protocol} dport {port}"
    back = f"ip saddr {destination} ip daddr {source} {protocol} sport {port}"
    yield f"{there} ct state new,established"
    yield f"{back} ct state established"


def script(commands: Iterable[Command]) -> str:
    """Commands as a shell runs them, one after the other."""
    return "\n".join(shlex.join(map(str, command)) for command in commands)


def obstacle() -> str | None:
    """Why there can be no such network here; None where there can."""
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
