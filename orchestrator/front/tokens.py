"""Which bearer tokens may call, by the settings."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.settings import OrchestratorSettings
from tandem.errors import StartupError
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.tokens import BearerTokens
from tandem.rpc.security.web_tokens import Claims, FileKeys, Keys, UrlKeys, WebTokens, check_url
from tandem.settings import variable_of


def tokens_of(settings: OrchestratorSettings) -> BearerTokens | None:
    """The tokens that may call; None if no call needs one.

    Raises:
        StartupError: a file is missing or unfit, or settings that belong together are not all
            there.
    """
    file, issued = settings.token_file, _issued(settings)
    if file is None and issued is None:
        return None
    named = None if file is None else NamedFile(_variable("token_file"), file)
    return BearerTokens(named, issued)


def _issued(settings: OrchestratorSettings) -> WebTokens | None:
    wanted = settings.token_jwks_file is not None or bool(settings.token_jwks_url)
    for name in ("token_issuer", "token_audience"):
        if wanted and not getattr(settings, name):
            raise StartupError(
                f"{_variable(name)} must be set: else tokens that were made for others may call"
            )
        if getattr(settings, name) and not wanted:
            raise StartupError(
                f"{_variable(name)} needs {_variable('token_jwks_file')} or"
                f" {_variable('token_jwks_url')}"
            )
    if not wanted:
        return None
    return WebTokens(
        Claims(
            settings.token_issuer,
            settings.token_audience,
            settings.token_name_claim,
            settings.token_leeway_seconds,
        ),
        _keys(settings),
    )


def _keys(settings: OrchestratorSettings) -> Callable[[str], Keys]:
    file, url = settings.token_jwks_file, settings.token_jwks_url
    setting = _variable("token_jwks_url")
    if file is not None and url:
        raise StartupError(f"give {_variable('token_jwks_file')} or {setting}, not both")
    if file is not None:
        return FileKeys(NamedFile(_variable("token_jwks_file"), file))
    check_url(setting, url)
    return UrlKeys(setting, url)


def _variable(name: str) -> str:
    return variable_of(OrchestratorSettings, name)
