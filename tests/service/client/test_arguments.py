"""What clients are made with, without a service."""

from __future__ import annotations

import pytest

import tandem
from tandem.failure import Misconfigured


def test_arguments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(Misconfigured, match="certificate and key go together"):
        tandem.Client(certificate="a.pem")
    with pytest.raises(Misconfigured, match="the token would go to far:1 without TLS"):
        tandem.AsyncClient("far:1", token="secret")
    with pytest.raises(Misconfigured, match="ca"):
        tandem.Client(ca="nothing.pem")


def test_the_environment_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ADDRESS", "127.0.0.1:1")
    with tandem.Client() as client, pytest.raises(tandem.Lost, match=r"answers at 127.0.0.1:1:"):
        client.info()


def test_the_package_names_what_it_has() -> None:
    assert {"Client", "AsyncClient", "Local", "CallFailed"} <= set(dir(tandem))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = tandem.Nothing  # type: ignore[attr-defined]
