"""The `tandem` command as people run it: real processes, the embedded pair."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import __version__
from tandem.client.connection import Connection
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.cli import comparison
from tandem.tools.cli.display import comparison as report
from tandem.tools.load.method import BLOCK, Method
from tandem.tools.load.requests import PROMPTS
from tests.support.models.chat_templates import TEMPLATES
from tests.support.repository import ROOT
from tests.system.command.test_up import (
    PLAIN,
    START_SECONDS,
    TANDEM,
    Up,
    invoke,
    one_line,
    settings_of,
    tandem,
    up,
)

# What others have set for the services that `up` starts, and what it is told itself.
ENVIRONMENT = {
    "TANDEM_TARGET_LISTEN": "localhost:0",
    "TANDEM_TARGET_DRAIN_SECONDS": "3",
    "TANDEM_TARGET_MAX_LENGTH": "1000",
    "TANDEM_ORCHESTRATOR_LISTEN": "127.0.0.1:1",
    "TANDEM_ORCHESTRATOR_GAMMA": "7",
}
OPTIONS = ["--max-length", "900", "--gamma", "4"]
TEXT = ["generate", "import ", "--seed", "3", "--gamma", "4", "-n", "12"]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, embedded_pair: tuple[Path, Path]
) -> Iterator[tuple[Up, str]]:
    """`tandem up` with the embedded pair, and its address."""
    folder = tmp_path_factory.mktemp("up")
    target = folder / "target"  # with a chat template
    shutil.copytree(embedded_pair[1], target)
    (target / "chat_template.jinja").write_text(TEMPLATES["qwen-2.5"])
    models = ["--target", str(target), "--drafter", str(embedded_pair[0])]
    traces = ["--trace-dir", str(folder), "--log-dir", str(folder)]
    with up(folder, *models, *traces, *OPTIONS, **ENVIRONMENT) as running:
        yield running, running.wait_ready()


@pytest.fixture
def address(served: tuple[Up, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the commands of a test find their orchestrator."""
    monkeypatch.setenv("TANDEM_ADDRESS", served[1])
    monkeypatch.setitem(PLAIN, "TANDEM_ADDRESS", served[1])
    return served[1]


def test_up_options_win_over_the_environment_and_that_over_defaults(
    served: tuple[Up, str],
) -> None:
    children = served[0].children()
    assert set(children) == {"drafter_svc", "target_svc", "orchestrator"}
    target, orchestrator = (settings_of(children[name]) for name in ("target_svc", "orchestrator"))
    for settings, name, value in (
        (target, "TARGET_LISTEN", "localhost:0"),
        (target, "TARGET_DRAIN_SECONDS", "3"),
        (target, "TARGET_MAX_LENGTH", "900"),
        (orchestrator, "ORCHESTRATOR_LISTEN", "127.0.0.1:0"),
        (orchestrator, "ORCHESTRATOR_GAMMA", "4"),
        (orchestrator, "ORCHESTRATOR_DRAIN_SECONDS", "30"),
    ):
        assert settings[f"TANDEM_{name}"] == value, name


@pytest.mark.parametrize("command", ["", "up", "generate", "chat", "demo", "info", "top"])
def test_help_reads_well(command: str) -> None:
    run = invoke(*filter(None, [command]), "--help")
    assert run.exit_code == 0, run.stderr
    assert "Usage:" in run.stdout
    expected = {"": "generate", "up": "--target", "generate": "--gamma", "demo": "--repeats"}
    expected |= {"top": "--interval"}
    assert expected.get(command, "--address") in run.stdout


def test_version() -> None:
    assert invoke("--version").stdout == f"tandem {__version__}\n"


def test_imports_no_model_library_and_help_no_grpc() -> None:
    files = (ROOT / "tandem/tools/cli").rglob("[a-z]*.py")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    program = (
        "import sys, importlib; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "import tandem.tools.cli.main; assert 'grpc' not in sys.modules;"
        f"[importlib.import_module(name) for name in {modules}]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


class FakeClient:
    """Answers at once, with texts that depend on the prompt alone but for one."""

    def __init__(self, odd: Method | None = None) -> None:
        self.odd = odd

    def generate(
        self, generation: pb.Generation, metadata: object
    ) -> Iterator[pb.GenerateResponse]:
        speculation = generation.speculation
        method = Method(speculation.verifier, speculation.gamma)
        tokens = [pb.Token(id=len(generation.prompt)), pb.Token(id=int(method == self.odd))]
        yield pb.GenerateResponse(round=pb.Round(tokens=tokens))
        stages = pb.Stages(total_ns=1000, verify_wait_ns=700, round_wall_ns=[9], round_model_ns=[5])
        summary = pb.Summary(new_tokens=2, rounds=2, gammas=[0, speculation.gamma], stages=stages)
        yield pb.GenerateResponse(summary=summary)


def samples_of(client: FakeClient, budget_s: float = 9.0) -> list[comparison.TurnResult]:
    groups = comparison.compare(client, comparison.plan(2), 2, budget_s)  # type: ignore[arg-type]
    return [sample for group in groups for sample in group]


def test_a_comparison_keeps_to_its_budget() -> None:
    group = len(comparison.TEMPERATURES) * len(comparison.METHODS)
    assert len(samples_of(FakeClient())) == 2 * len(PROMPTS) * group
    assert len(samples_of(FakeClient(), budget_s=0.0)) == group


def test_a_comparison_finds_a_greedy_text_that_differs() -> None:
    assert comparison.first_difference(samples_of(FakeClient())) is None
    found = comparison.first_difference(samples_of(FakeClient(odd=BLOCK)))
    assert found == "prompt 'def ' with block, from token 1 on"


def test_the_report_shares_out_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_report(samples_of(FakeClient()))
    shown = capsys.readouterr().out
    assert "70%" in shown
    assert "Each line is 8 texts" in shown


def test_json_holds_everything(address: str) -> None:
    reply = json.loads(invoke(*TEXT, "--json").stdout)
    assert len(reply["token_ids"]) == len(reply["origins"]) == 12
    summary = reply["summary"]
    assert summary["new_tokens"] == 12
    assert summary["effective"]["sampling"]["seed"] == "3"
    told = {"verifier": "block", "gamma": 4, "verifier_options": {}}
    assert summary["effective"]["speculation"] == told
    assert set(reply["origins"]) <= {
        "TOKEN_ORIGIN_ACCEPTED",
        "TOKEN_ORIGIN_CORRECTION",
        "TOKEN_ORIGIN_BONUS",
    }


def test_a_pipe_gets_the_plain_text(address: str) -> None:
    expected = json.loads(invoke(*TEXT, "--json").stdout)["text"]
    run = tandem(*TEXT)
    assert run.stdout == (expected if expected.endswith("\n") else f"{expected}\n")
    assert re.match(r"12 tokens in .* tokens/s\).* · ended by length · seed 3\n$", run.stderr)
    assert invoke("generate", "-", *TEXT[2:], stdin="import ").stdout == run.stdout


def test_a_terminal_gets_colours_and_a_legend(address: str) -> None:
    master, slave = pty.openpty()
    environment = {**PLAIN, "TERM": "xterm-256color"}
    del environment["NO_COLOR"]
    run = subprocess.Popen([*TANDEM, *TEXT], stdout=slave, stderr=slave, cwd=ROOT, env=environment)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert run.wait() == 0
    assert b"drafted and accepted" in shown
    assert b"\x1b[32m" in shown
    assert b"\x1b[1;34m" in shown


def test_a_text_that_is_shaped(address: str, tmp_path: Path) -> None:
    def text(*options: str) -> str:
        reply = json.loads(invoke(*TEXT, *options, "--json").stdout)
        return str(reply["text"])

    assert text("--choice", "one", "--choice", "two") in ("one", "two")
    assert text("--regex", "x[12]") in ("x1", "x2")
    assert text("--json-schema", '{"enum": [7]}').strip() == "7"
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [8]}')
    grammar.write_text('start: "ab"')
    assert text("--json-schema", str(schema)).strip() == "8"
    assert text("--grammar", str(grammar)) == "ab"
    plain = text()
    assert text("--frequency-penalty", "2", "--presence-penalty", "2") != plain
    assert text("--repetition-penalty", "9") != plain
    assert "os" not in text("--bad-word", "os", "--logit-bias", "11=1", "--min-tokens", "3")
    reply = json.loads(invoke(*TEXT, "--json", "--log-probs", "1").stdout)
    assert len(reply["log_probs"]) == len(reply["token_ids"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--logit-bias", "a=1"],
        ["--logit-bias", "5"],
        ["--json-schema", "{"],
        ["--grammar", "nowhere.lark"],
        ["--regex", "a", "--choice", "b"],
    ],
)
def test_what_shapes_no_text_is_refused(arguments: list[str]) -> None:
    assert invoke("generate", "x", *arguments).exit_code == 2


def test_a_chat_by_a_pipe_remembers(address: str) -> None:
    said = "Hi\n\nWhy?\n/reset\nHi\n/quit\nnever\n"
    options = ["--seed", "5", "--gamma", "4", "-n", "9", "--system", "Be brief."]
    run = tandem("chat", *options, stdin=said)
    assert run.returncode == 0, run.stderr
    summaries = [line for line in run.stderr.splitlines() if "tokens/s" in line]
    assert len(summaries) == 3
    again = tandem("chat", *options, stdin="Hi\n")
    assert run.stdout.startswith(again.stdout), "a chat begins as the same chat does"
    assert run.stdout.endswith(again.stdout), "and so does one that was reset"
    assert run.stdout.count(again.stdout) >= 2
    refused = tandem("chat", "--temperature", "-1", stdin="Hi\n")
    assert refused.returncode == 1
    assert "sampling.temperature" in refused.stderr


def test_token_ids_instead_of_a_text(address: str) -> None:
    run = invoke("generate", "--token-ids", "295,738", "-n", "4", "--gamma", "0", "--json")
    assert json.loads(run.stdout)["summary"]["gammas"] == [0] * 4


def test_info(address: str) -> None:
    run = invoke("info")
    assert run.exit_code == 0
    assert "block, gbv, greedy_block, spectr, token (default block)" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "INVALID_ARGUMENT: sampling.temperature"),
        (["--verifier", "guess"], "INVALID_ARGUMENT: verifier 'guess' is unknown"),
        (["--timeout", "0.001"], "DEADLINE_EXCEEDED"),
    ],
)
def test_a_refused_request_is_one_line(address: str, arguments: list[str], says: str) -> None:
    run = invoke("generate", "x", *arguments)
    assert run.exit_code == 1
    assert one_line(run).startswith(f"tandem: {says}")


def test_nobody_at_the_address() -> None:
    run = invoke("generate", "x", "--address", "127.0.0.1:1")
    assert run.exit_code == 1
    assert "no orchestrator answers at 127.0.0.1:1: start one with `tandem up`" in one_line(run)


@pytest.mark.parametrize("arguments", [[], ["x", "--token-ids", "1"], ["--token-ids", "1,a"]])
def test_one_prompt_in_one_form(arguments: list[str]) -> None:
    assert invoke("generate", *arguments).exit_code == 2


def test_up_on_a_taken_port(address: str) -> None:
    run = tandem("up", "--listen", address)
    assert run.returncode == 2
    assert one_line(run).startswith(f"tandem: cannot listen on {address}: ")


def test_up_drains_on_sigterm(served: tuple[Up, str], address: str) -> None:
    """Last of the tests that share a stack: a running text finishes, all exit with 0."""
    running, _ = served
    children = running.children()
    text = subprocess.Popen(
        [*TANDEM, "generate", "import ", "-n", "300", "--ignore-eos", "--json"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=PLAIN,
    )
    with Connection(address) as client:
        while client.info().active_requests == 0:
            assert text.poll() is None
    running.popen.terminate()
    assert running.popen.wait(START_SECONDS) == 0
    reply, _ = text.communicate(timeout=START_SECONDS)
    assert json.loads(reply)["summary"]["new_tokens"] == 300
    assert not [pid for pid in children.values() if Path(f"/proc/{pid}").exists()]
    for name in ("drafter", "target", "orchestrator"):
        trace = (running.out.parent / f"{name}.jsonl").read_text().splitlines()
        assert all(json.loads(line)["resourceSpans"] for line in trace)
