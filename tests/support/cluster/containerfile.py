"""Parses deploy/Containerfile: its stages, and the contents of a service's image."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.repository import ROOT

CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()
STAGES = dict(re.findall(r"^FROM .* AS (\S+)\n((?:(?!FROM ).*\n)*)", CONTAINERFILE, re.M))
# PATH in the base image.
_BASE_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Image:
    """A service's image.

    Attributes:
        environment: variables of every process in it.
        python: folder of the Python environment that the build made.
        folder: working directory of processes.
        copied: folders of the repository that are copied into it.
        entrypoint: the command.
    """

    environment: Mapping[str, str]
    python: str
    folder: str
    copied: Sequence[str]
    entrypoint: Sequence[str]


def image(service: str) -> Image:
    """The image of a service."""
    own = STAGES[service]
    text = (STAGES["runtime"] + own).replace("\\\n", " ")
    variables = [shlex.split(line) for line in re.findall(r"^ENV (.*)$", text, re.M)]
    environment = dict(one.split("=", 1) for line in variables for one in line)
    environment["PATH"] = environment["PATH"].replace("$PATH", _BASE_PATH)
    (folder,) = re.findall(r"^WORKDIR (.*)$", text, re.M)
    (built,) = re.findall(r"^COPY --from=build-\S+ (\S+) \1$", own, re.M)
    copied = re.findall(rf"^COPY (?:--from=code {folder}/)?(\S+/) \1$", own, re.M)
    (command,) = re.findall(r"^ENTRYPOINT (.*)$", own, re.M)
    return Image(environment, built, folder, copied, json.loads(command))
