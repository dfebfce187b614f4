"""`tandem up` as people run it: what it starts, with which settings, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tandem.drafting.methods import METHODS
from tandem.tools.cli.main import app
from tandem.tools.local.endpoints import free_or_other
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack
from tests.support.models.tiny import save_random_llama
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

PROCESSES = pytest.mark.campaign(
    "what `tandem up` passes to services that run, and prints of them",
    "system/command/test_cli.py: a real `tandem up`; refusals without processes (this "
    "file); unit/tools/local",
)

TANDEM = [sys.executable, "-m", "tandem.tools.cli"]
PLAIN = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
START_SECONDS = 300  # on a busy machine
# Tests run beside each other.
_ANY_PORTS = {
    "TANDEM_ORCHESTRATOR_HTTP_LISTEN": "127.0.0.1:0",
    **{f"TANDEM_{s}_METRICS_LISTEN": "127.0.0.1:0" for s in ("ORCHESTRATOR", "TARGET", "DRAFTER")},
}


def tandem(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TANDEM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=PLAIN,
        timeout=START_SECONDS,
    )


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    """The same in this process, where a second of start-up would say nothing more."""
    return CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "100"})


def one_line(run: subprocess.CompletedProcess[str] | Result) -> str:
    """The only line on standard error; nothing is on standard output."""
    assert run.stdout == ""
    (line,) = run.stderr.strip().splitlines()
    return line


class Up:
    """A running `tandem up`."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.out, self.err = folder / "up.out", folder / "up.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                [*TANDEM, "up", "--listen", "127.0.0.1:0", *options],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**PLAIN, **_ANY_PORTS, **environment},
            )

    def wait_ready(self) -> str:
        """The orchestrator's address."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.popen.poll() is None:
            if "ready; try" in (text := self.out.read_text()):
                return text.split()[1]
            time.sleep(0.05)
        raise AssertionError(f"never ready:\n{self.out.read_text()}{self.err.read_text()}")

    def children(self) -> dict[str, int]:
        """Process ids by module."""
        pid = self.popen.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = {child: Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in found}
        return {name[3]: int(child) for child, name in names.items()}


@contextmanager
def up(folder: Path, *options: str, **environment: str) -> Iterator[Up]:
    running = Up(folder, *options, **environment)
    try:
        yield running
    finally:
        if running.popen.poll() is None:
            running.popen.terminate()
        running.popen.wait(START_SECONDS)


def test_http_and_metrics_take_other_ports_where_theirs_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert free_or_other(address) == "127.0.0.1:0"
        assert free_or_other("127.0.0.1:8000", ["[::1]:8000"]) == "127.0.0.1:0"
        run = invoke("up", "--listen", "127.0.0.1:0", "--http", address)
        assert run.exit_code == 2
        assert one_line(run).endswith("choose another HOST:PORT with --http")
    assert free_or_other(address) == address


def test_up_on_no_address() -> None:
    run = invoke("up", "--listen", "nowhere")
    assert run.exit_code == 2
    assert one_line(run).startswith("tandem: cannot listen on nowhere: ")


@PROCESSES
def test_up_without_the_model(tmp_path: Path) -> None:
    run = tandem("up", "--target", f"{tmp_path}/no", "--drafter", "none")
    assert run.returncode == 2
    assert f"target: cannot load the model '{tmp_path}/no'" in one_line(run)


@pytest.mark.parametrize("model", ["/nope", "./nope", "~/nope", "a/b/c", "no pe", "tests"])
def test_up_refuses_what_can_only_be_a_directory_and_is_none(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Stack, "start", lambda *_: pytest.fail("a process was started"))
    for service, pair in (("target", (model, "none")), ("drafter", ("gpt2", model))):
        run = invoke("up", "--listen", "127.0.0.1:0", "--target", pair[0], "--drafter", pair[1])
        assert run.exit_code == 2
        assert one_line(run) == (
            f"tandem: {service}: cannot load the model {model!r}:"
            " no directory of that name has a config.json"
        )


def test_up_takes_a_directory_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_llama(tmp_path / "model", seed=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    pair = Pair("~/model", "organisation/some-name_1.5")
    settings = pair.settings()
    assert settings["target"]["MODEL"] == str(tmp_path / "model")
    assert settings["drafter"]["MODEL"] == "organisation/some-name_1.5"


@PROCESSES
def test_up_with_a_long_gamma_drafts_as_long(tmp_path: Path) -> None:
    model = str(save_random_llama(tmp_path / "model", seed=1))
    pair = ["--target", model, "--drafter", model]
    with up(tmp_path, "--gamma", "50", *pair, TANDEM_TARGET_MAX_GAMMA="60") as running:
        address = running.wait_ready()
        ids = ["generate", "--address", address, "--token-ids", "1", "-n", "60", "--ignore-eos"]
        summary = json.loads(invoke(*ids, "--json").stdout)["summary"]
        children = running.children()
        for service, longest in (("drafter", "50"), ("target", "60")):
            settings = settings_of(children[f"{service}_svc"])
            assert settings[f"TANDEM_{service.upper()}_MAX_GAMMA"] == longest
    assert summary["effective"]["speculation"]["gamma"] == 50
    assert max(summary["gammas"]) == 50


@pytest.mark.parametrize(
    ("environment", "gamma", "sentence"),
    [
        ({}, "65", "gamma 65 is too long: at most 64 tokens a draft"),
        (
            {"TANDEM_DRAFTER_MAX_GAMMA": "20"},
            "50",
            "gamma 50 is more than TANDEM_DRAFTER_MAX_GAMMA=20 allows:"
            " raise the one or lower the other",
        ),
        (
            {"TANDEM_ORCHESTRATOR_GAMMA": "12", "TANDEM_TARGET_MAX_GAMMA": "8"},
            None,
            "gamma 12 is more than TANDEM_TARGET_MAX_GAMMA=8 allows:"
            " raise the one or lower the other",
        ),
    ],
)
def test_up_refuses_a_gamma_that_cannot_be_had(
    environment: dict[str, str],
    gamma: str | None,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Stack, "start", lambda *_: pytest.fail("a process was started"))
    option = ["--gamma", gamma] if gamma else []
    run = invoke("up", "--listen", "127.0.0.1:0", *option)
    assert run.exit_code == 2
    assert one_line(run) == f"tandem: {sentence}"


def test_up_with_a_target_alone_drafts_by_lookup() -> None:
    assert Pair(target="models/target").settings()["drafter"]["RECIPE"] == "lookup"
    assert Pair(target="models/target", inside=True).settings()["target"]["DRAFTS"] == "lookup"
    assert "drafter" not in Pair(target="models/target", drafter="none").settings()


@PROCESSES
def test_up_with_a_pair_that_does_not_fit(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target", seed=1, vocab_size=5)
    drafter = save_random_llama(tmp_path / "drafter", seed=2, vocab_size=6)
    pair = ["--target", str(target), "--drafter", str(drafter)]
    run = tandem("up", "--listen", "127.0.0.1:0", *pair)
    assert run.returncode == 2
    assert "has 6 token ids, the target 5" in one_line(run)


@PROCESSES
def test_up_with_a_recipe(tmp_path: Path) -> None:
    target, drafter, second = (
        str(save_random_llama(tmp_path / name, seed=i)) for i, name in enumerate("abc")
    )
    recipe = tmp_path / "recipe.toml"
    parts = [f'[[parts]]\nmethod = "model"\nmodel = "{model}"\n' for model in (drafter, second)]
    recipe.write_text("\n".join(['method = "forest"', *parts]))
    pair = ["--target", target, "--drafter", drafter]
    with up(tmp_path, "--recipe", str(recipe), *pair, TANDEM_DRAFTER_METHOD="tree") as running:
        address = running.wait_ready()
        shown = "forest (parts model (model b) + model (model c); max_nodes 16)"
        assert f"recipe       {shown}" in running.out.read_text()
        assert shown in invoke("info", "--address", address).stdout
        ids = ["generate", "--address", address, "--token-ids", "1", "-n", "20", "--ignore-eos"]
        summary = json.loads(invoke(*ids, "--nodes", "8", "--gamma", "4", "--json").stdout)[
            "summary"
        ]
    assert max(summary["nodes"]) == 8


@PROCESSES
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--recipe", "trees", "--drafter", "models/drafter"],
            f"the recipe trees is neither built in ({', '.join(METHODS)}) nor a file:"
            " No such file or directory",
        ),
        (["--recipe", "tree", "--drafter", "none"], "--drafter none that nothing does"),
        (["--recipe", "tree"], "the recipe tree needs a model: name one with"),
    ],
)
def test_up_with_a_bad_recipe(options: list[str], sentence: str) -> None:
    run = tandem("up", "--listen", "127.0.0.1:0", "--target", "models/target", *options)
    assert run.returncode == 2
    assert sentence in one_line(run)


def settings_of(pid: int) -> dict[str, str]:
    """The TANDEM_* variables of a process."""
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if line.startswith("TANDEM_"))


@PROCESSES
def test_up_with_a_model_of_the_environment_names_a_service_that_dies(tmp_path: Path) -> None:
    """Here the target, of a recipe without a drafter's model."""
    model = save_random_llama(tmp_path / "model", seed=1)
    environment = {
        "TANDEM_TARGET_MODEL": str(model),
        "TANDEM_TARGET_MAX_LENGTH": "100",
        "TANDEM_TARGET_LISTEN": "localhost:0",
        "TANDEM_ORCHESTRATOR_LISTEN": "127.0.0.1:1",
        "TANDEM_ORCHESTRATOR_VERIFIER": "token",
        "TANDEM_ORCHESTRATOR_GAMMA": "7",
        "TANDEM_TARGET_DRAIN_SECONDS": "3",
        "TANDEM_TARGET_LOG_LEVEL": "debug",
    }
    options = ["--recipe", "lookup", "--gamma", "0", "--max-length", "90"]
    with up(tmp_path, *options, **environment) as running:
        address = running.wait_ready()
        children = running.children()
        assert set(children) == {"drafter_svc", "target_svc", "orchestrator"}
        target = settings_of(children["target_svc"])
        orchestrator = settings_of(children["orchestrator"])
        for settings, name, value in (
            (target, "TARGET_MODEL", str(model)),
            (target, "TARGET_LISTEN", "localhost:0"),
            (target, "TARGET_DRAIN_SECONDS", "3"),
            (target, "TARGET_LOG_LEVEL", "debug"),
            (target, "TARGET_MAX_LENGTH", "90"),
            (orchestrator, "ORCHESTRATOR_LISTEN", "127.0.0.1:0"),
            (orchestrator, "ORCHESTRATOR_VERIFIER", "token"),
            (orchestrator, "ORCHESTRATOR_GAMMA", "0"),
            (orchestrator, "ORCHESTRATOR_DRAIN_SECONDS", "30"),
        ):
            assert settings[f"TANDEM_{name}"] == value, name
        ids = ["generate", "--address", address, "--token-ids", "1", "-n", "3"]
        assert re.fullmatch(r"([0-4] ){3}\n", invoke(*ids).stdout)
        told = dict(re.findall(r"^(HTTP|metrics) +(.*)$", running.out.read_text(), re.MULTILINE))
        with urllib.request.urlopen(f"{told['HTTP']}/models") as reply:
            assert [one["id"] for one in json.load(reply)["data"]] == ["model"]
        metrics = told["metrics"].split()
        assert len(metrics) == 3
        assert f"watch tandem top {' '.join(metrics)}" in running.out.read_text()
        assert invoke("top", *metrics, "--count", "1", "--interval", "0.1").exit_code == 0
        os.kill(children["target_svc"], signal.SIGKILL)
        assert running.popen.wait(START_SECONDS) == 1
    assert "tandem: the target was ended by SIGKILL" in running.err.read_text()


def test_up_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Not even a target that is starting; its drafter is none."""
    model = save_random_llama(tmp_path / "model", seed=1)
    environment = {"TANDEM_TARGET_MODEL": str(model), "TANDEM_DRAFTER_MODEL": "none"}
    with up(tmp_path, **environment) as running:
        wait_until(lambda: "target_svc" in running.children())
        children = running.children()
        assert set(children) == {"target_svc"}  # a drafter would come first
        os.kill(running.popen.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in children.values()))


def is_running(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for yet does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_up_needs_logs_that_tell_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_LOG_LEVEL", "error")
    run = invoke("up", "--listen", "127.0.0.1:0")
    assert run.exit_code == 2
    assert "TANDEM_DRAFTER_LOG_LEVEL: the ports are read" in one_line(run)
