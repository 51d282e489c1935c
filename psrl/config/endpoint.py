"""A model that somebody else serves: the address of its API, its name there, and the key."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from psrl.errors import ConfigError

SCHEMES = ("http://", "https://")
USUAL_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"
"""What is sent where there is no key: clients insist on one, servers without keys ignore it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An API that answers chat completions at `<url>/v1/chat/completions`."""

    url: str
    """Without `/v1` and without a slash at its end."""
    model: str | None
    """Name of the model there; None: the only one that it lists."""
    api_key: str = field(repr=False)


def is_endpoint(text: str) -> bool:
    """Whether this names an API, and not a folder."""
    return text.startswith(SCHEMES)


def read_endpoint(url: str, *, model: str | None, api_key_env: str | None) -> Endpoint:
    """The endpoint at `url`.

    Args:
        url: Such as `http://127.0.0.1:8000/v1`; `/v1` may be left out.
        model: Its name there.
        api_key_env: Environment variable that holds the key; None: OPENAI_API_KEY where it is set, else no key.

    Raises:
        ConfigError: The address is none, holds a password, or the named variable is not set.
    """
    parts = urlsplit(url)
    if not parts.hostname or parts.query or parts.fragment or parts.username:
        rule = "is no address of an API"
        raise ConfigError(key="--model", value=url, rule=rule, fix="write http://HOST:PORT/v1; a key comes from --api-key-env VARIABLE")
    key = os.environ.get(api_key_env or USUAL_VARIABLE)
    if api_key_env is not None and not key:
        fix = f"export {api_key_env}=..., or leave --api-key-env out where the endpoint wants no key"
        raise ConfigError(key="--api-key-env", value=api_key_env, rule="is not set in the environment", fix=fix)
    return Endpoint(url=url.rstrip("/").removesuffix("/v1").rstrip("/"), model=model, api_key=key or NO_KEY)
