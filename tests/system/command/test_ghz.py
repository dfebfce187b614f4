"""The real ghz, by `tandem load`, on the three services: every configuration of deploy/ghz."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.tools.load.ghz.scenario import scenarios
from tandem.tools.local.process import ServiceProcess
from tests.support.processes.ports import free_ports
from tests.support.processes.services import Trio, trio
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.campaign(
    "the real ghz with every configuration of deploy/ghz",
    "unit/tools/load: its reports and arguments",
)

CONFIGS = ROOT / "deploy" / "ghz"
SCENARIOS = [scenario.name for scenario in scenarios(CONFIGS, [])]
# What makes each of them short, over what its file says.
SHORT = {
    "closed": ["total=16"],
    "open": ["duration=2s"],
    "steps": ["duration=4s", "load-step-duration=1s", "load-max-duration=4s"],
    "token": ["total=12"],
    "cancels": ["total=200"],
}


@pytest.fixture(scope="module")
def ghz() -> str:
    folders = [str(ROOT / ".cache" / "bin"), os.environ.get("GOBIN", ""), os.environ["PATH"]]
    found = shutil.which("ghz", path=os.pathsep.join(filter(None, folders)))
    if found is None:
        pytest.skip(
            "no ghz in .cache/bin, in GOBIN or on PATH; deploy/ghz/fetch.sh builds it in some"
            " minutes, with Go"
        )
    return found


@pytest.fixture(scope="module")
def endpoints() -> dict[str, str]:
    names = ("orchestrator", "drafter", "target")
    ports = free_ports(len(names))
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


@pytest.fixture(scope="module")
def stack(
    ghz: str, endpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    settings = {name: {"METRICS_LISTEN": endpoint} for name, endpoint in endpoints.items()}
    with trio(tmp_path_factory.mktemp("ghz"), **settings) as running:  # type: ignore[arg-type]
        yield running


def load(*arguments: str, address: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.tools.cli", "load", *arguments]
    clean = {name: value for name, value in os.environ.items() if "METRICS_LISTEN" not in name}
    return subprocess.run(
        [*command, "--address", address, "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean,
        check=False,
    )


def flags_of(name: str) -> list[str]:
    given = SHORT[name.rpartition("-")[2]]
    return [word for flag in given for word in ("--ghz", flag)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_call_fails_and_nothing_stays_open(
    name: str, stack: Trio, endpoints: dict[str, str], tmp_path: Path
) -> None:
    metrics = [word for endpoint in endpoints.values() for word in ("--metrics", endpoint)]
    run = load(
        *(name, "--no-sweep", *flags_of(name), *metrics),
        address=stack.orchestrator.address,
        out=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    (found,) = json.loads((tmp_path / "report.json").read_text())["loads"]
    statuses = found["statuses"]
    cut = name in ("generate-cancels", "generate-first-token")
    assert set(statuses) <= ({"OK", "Canceled"} if cut else {"OK"})
    total = dict(flag.split("=") for flag in SHORT[name.rpartition("-")[2]]).get("total")
    assert sum(statuses.values()) == int(total) if total else sum(statuses.values()) >= 3
    assert found["left_open"] == 0
    assert found["served"]["tokens"] > 0
    if cut:
        assert statuses["Canceled"] > sum(statuses.values()) / 2
        assert found["goodput"] is None
    else:
        assert found["latency"]["p50"] <= found["latency"]["p99"]
        assert 0 < found["goodput"]["share"] <= 1
    if name == "generate-first-token":
        assert found["first_message"]["p50"] > 0
    stack.wait_idle()


def test_a_sweep_and_judging_what_ran_elsewhere(stack: Trio, tmp_path: Path) -> None:
    """Without metrics: calls alone are judged, and no storm is run."""
    address = stack.orchestrator.address
    # Within a millisecond no text is good, and half of a text is asked for in no second.
    wanted = ["--sweep", "--rate", "1", "--seconds", "1", "--slo-latency-ms", "1"]
    run = load("complete-closed", "--ghz", "total=8", *wanted, address=address, out=tmp_path)
    assert run.returncode == 1
    assert "no rate held" in run.stderr
    assert "loads failed" not in run.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert [level["goodput"]["share"] for level in found["sweep"]] == [0]
    assert found["loads"][0]["served"] is None
    page = (tmp_path / "report.html").read_text()
    assert "The highest rate that holds the objective" in page

    judged = load(
        *("--results", str(tmp_path / "complete-closed.json")), address=address, out=tmp_path / "j"
    )
    assert judged.returncode == 0, judged.stderr
    storm = load("generate-cancels", "--no-sweep", address=address, out=tmp_path / "s")
    assert storm.returncode == 2
    assert "no metrics to look at" in storm.stderr


def test_a_server_that_refuses_is_reported(ghz: str, tmp_path: Path) -> None:
    """ghz itself ends with 0. The orchestrator's target is away, so it takes no text."""
    settings = {"LISTEN": "127.0.0.1:0", "TARGETS": "127.0.0.1:1", "DRAFTERS": ""}
    environment = {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in settings.items()}
    environment["TANDEM_ORCHESTRATOR_LOG_FORMAT"] = "json"
    process = ServiceProcess("orchestrator", "orchestrator", "127.0.0.1", environment, root=ROOT)
    try:
        wait_until(lambda: process.port is not None)
        run = load(
            *("generate-closed", "--ghz", "total=20", "--seconds", "1"),
            address=process.address,
            out=tmp_path,
        )
    finally:
        process.stop(10.0)
    assert run.returncode == 1
    assert "1 of 1 loads failed: generate-closed" in run.stderr
    assert "20 of 20 calls failed: 20 Unavailable" in run.stdout
    assert "not ready" in run.stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["loads"][0]["statuses"] == {"Unavailable": 20}
    assert len(found["sweep"]) == 1  # there is nothing to be found
    assert "20 Unavailable" in (tmp_path / "report.html").read_text()


def test_a_missing_ghz_says_how_to_install_it(tmp_path: Path) -> None:
    """A checkout without one, as an environment without any folder of programs."""
    program = (
        "from pathlib import Path; from tandem.tools.load.ghz.tool import find\n"
        "from tandem.failure import Misconfigured\n"
        f"try: find(Path({str(tmp_path)!r}))\n"
        "except Misconfigured as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "deploy/ghz/fetch.sh" in run.stdout
    assert "go install github.com/bojand/ghz/cmd/ghz@v" in run.stdout
    fetch = subprocess.run(
        ["/bin/bash", str(_copied(tmp_path))],
        env={"PATH": f"{tmp_path}:{_only('dirname', tmp_path)}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert fetch.returncode == 1
    assert "building it needs Go" in fetch.stderr


def _copied(folder: Path) -> Path:
    """The script, in a checkout that has nothing else."""
    script = folder / "deploy" / "ghz" / "fetch.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(CONFIGS / "fetch.sh", script)
    return script


def _only(program: str, folder: Path) -> Path:
    """A folder with one program in it."""
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / program).symlink_to(str(shutil.which(program)))
    return bin_


def documented() -> list[str]:
    """Every command of ghz in the documents, without its comment."""
    texts = [
        path.read_text() for path in (ROOT / "docs" / "load.md", ROOT / "deploy" / "README.md")
    ]
    found = [re.findall(r"(?:^|[/\s])ghz (--config .*)$", text, re.M) for text in texts]
    return [line.partition("#")[0] for lines in found for line in lines]


@pytest.mark.parametrize("command", documented())
def test_what_documents_say_to_run_can_be_run(
    command: str, ghz: str, stack: Trio, tmp_path: Path
) -> None:
    """With its own flags, but for a shorter load and the address."""
    folder = shutil.copytree(CONFIGS, tmp_path / "ghz")
    words = [word for word in shlex.split(command) if not word.startswith("localhost")]
    for flag, short in (("--total", "16"), ("--duration", "2s")):
        if flag in words:
            words[words.index(flag) + 1] = short
    if not {"--total", "--duration"} & set(words) and "open" not in command:
        words += ["--total", "16"]
    run = subprocess.run(
        [ghz, *words, stack.orchestrator.address],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    if "--output" in words:
        written = json.loads((folder / words[words.index("--output") + 1]).read_text())
        assert set(written["statusCodeDistribution"]) == {"OK"}
    else:
        wanted = "Canceled" if "--stream-call-count" in words else "OK"
        assert re.search(rf"\[{wanted}\]", run.stdout), run.stdout
    stack.wait_idle()


def test_what_is_no_flag_is_refused(ghz: str) -> None:
    """As the documents say of `--async=false`."""
    run = subprocess.run(
        [ghz, "--config", "generate-open.json", "--async=false", "127.0.0.1:1"],
        cwd=CONFIGS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    said = subprocess.run([ghz, "--help"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"--([a-zA-Z-]+)", said.stdout + said.stderr))
    for scenario in scenarios(CONFIGS, []):
        assert set(scenario.config) - {"host"} <= known, scenario.name
