"""ghz itself: found and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from tandem.failure import Failure, Misconfigured
from tandem.rpc.endpoint import Endpoint
from tandem.tools.load.ghz.calls import Calls, read
from tandem.tools.load.ghz.scenario import Scenario

# An hour of load, and time for its last calls.
_MOST_SECONDS = 4000.0
_SHOWN_LINES = 6
_BUILD = "GOBIN=$PWD/.cache/bin go install github.com/bojand/ghz/cmd/ghz@v0.121.0"


def find(root: Path) -> str:
    """Path of ghz: in .cache/bin below `root`, in GOBIN or on the PATH.

    Raises:
        Misconfigured: ghz is not installed; says how to get it.
    """
    folders = [str(root / ".cache" / "bin"), os.environ.get("GOBIN"), os.environ.get("PATH")]
    found = shutil.which("ghz", path=os.pathsep.join(filter(None, folders)))
    if found is None:
        raise Misconfigured(
            "there is no ghz in .cache/bin, in GOBIN or on the PATH: run deploy/ghz/fetch.sh,"
            f" or with Go 1.23 or newer: {_BUILD}"
        )
    return found


def run(
    ghz: str, scenario: Scenario, endpoint: Endpoint, report: Path, flags: Mapping[str, str]
) -> Calls:
    """Run a scenario, in the folder of its configuration.

    Args:
        ghz: the program.
        scenario: to run.
        endpoint: of the orchestrator.
        report: gets ghz's JSON.
        flags: override the configuration; by their names without dashes.

    Raises:
        Failure: no call could be sent.
    """
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    report.unlink(missing_ok=True)
    try:
        # Such a file is private to this user; anyone could read a command line.
        with NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(_config(scenario, endpoint), file)
            file.flush()
            command = [ghz, "--config", file.name, "--format", "json", "--output"]
            ended = subprocess.run(
                [*command, str(report.resolve()), *given, endpoint.address],
                cwd=scenario.path.parent,
                capture_output=True,
                text=True,
                timeout=_MOST_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise Failure(f"ghz took longer than {_MOST_SECONDS:g} s for {scenario.name}") from None
    if ended.returncode or not report.exists():
        lines = (ended.stderr or ended.stdout).strip().splitlines()[-_SHOWN_LINES:]
        raise Failure(f"ghz could not run {scenario.name}", tuple(lines))
    return read(report)[1]


def _config(scenario: Scenario, endpoint: Endpoint) -> dict[str, object]:
    """A scenario's configuration, with the endpoint's metadata and TLS files."""
    config: dict[str, object] = dict(json.loads(scenario.path.read_text("utf-8")))
    if endpoint.metadata:
        shown = dict(endpoint.metadata)
        metadata = config.get("metadata")
        config["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), **shown}
        config["reflect-metadata"] = shown
    if endpoint.tls is not None:
        files = {
            "cacert": endpoint.tls.authorities,
            "cert": endpoint.tls.certificate,
            "key": endpoint.tls.key,
        }
        config |= {name: str(file.path.resolve()) for name, file in files.items() if file}
        config |= {"insecure": False, "cname": endpoint.name}
    return config
