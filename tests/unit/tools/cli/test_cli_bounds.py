"""What the commands that generate load refuse before they send any request."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tandem.failure import Misconfigured
from tandem.tools.cli.main import app
from tandem.tools.load.objective import Objective


@pytest.mark.parametrize("command", ["load", "bench", "info"])
@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:", ":50050", "", "a:b"]
)
def test_an_address_has_a_port(command: str, address: str) -> None:
    run = CliRunner().invoke(app, [command, "--address", address])
    assert run.exit_code == 2
    assert "HOST:PORT" in run.stderr
    assert "starting" not in run.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "dns:///127.0.0.1:1", "unix:/no"])
def test_a_target_of_grpc_is_an_address(address: str) -> None:
    run = CliRunner().invoke(app, ["bench", "--address", address])
    assert run.exit_code == 1
    assert "no orchestrator answers" in run.stderr


@pytest.mark.parametrize(
    "option",
    [
        ["--texts", "50001"],
        ["--warm-up", "50001"],
        ["--concurrency", "16385"],
        ["--max-in-flight", "16385"],
    ],
)
def test_a_load_is_bounded(option: list[str]) -> None:
    run = CliRunner().invoke(app, ["bench", "--address", "127.0.0.1:1", *option])
    assert run.exit_code == 2
    assert option[0] in run.stderr


def test_no_limit_is_none() -> None:
    infinity = float("inf")
    assert Objective.of(infinity, 0.0, 5.0, 0.9) == Objective(None, None, 5.0, 0.9)
    assert "inf" not in str(Objective.of(infinity, infinity, infinity, 1.0))
    with pytest.raises(Misconfigured, match="no number"):
        Objective.of(float("nan"), 1.0, 1.0, 1.0)


@pytest.mark.parametrize("command", [["bench", "-a", "127.0.0.1:1"], ["plan", "nowhere"]])
@pytest.mark.parametrize("rate", ["inf", "nan"])
def test_a_rate_is_a_number(command: list[str], rate: str) -> None:
    run = CliRunner().invoke(app, [*command, "--rate", rate])
    assert run.exit_code == 2
    assert "--rate" in run.stderr
