"""A model that somebody else serves: the address of its API, its name there, and the key."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from psrl.errors import ConfigError

SCHEMES = ("http://", "https://")
ANSWERING_PATHS = ("/chat/completions", "/completions")
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):[0-9]{1,5}(/|$)")
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
    key_variable: str | None = None
    """Environment variable that the key is of; None: there is no key."""


def is_endpoint(text: str) -> bool:
    """Whether this names an API, and not a folder."""
    return text.lower().startswith(SCHEMES)


def refuse_address_without_scheme(text: str) -> None:
    """A model's folder is no `HOST:PORT`, unless it is there.

    Raises:
        ConfigError: It looks like an address.
    """
    if ("://" in text or _HOST_AND_PORT.match(text)) and not Path(text).exists():
        rule = "looks like an address of an API, which begins with http:// or https://"
        raise ConfigError(key="--model", value=text, rule=rule, fix=f"write http://{text.rpartition('://')[2]}, or name a model folder")


def read_endpoint(url: str, *, model: str | None, api_key_env: str | None) -> Endpoint:
    """The endpoint at `url`.

    Args:
        url: Such as `http://127.0.0.1:8000/v1`; `/v1` may be left out.
        model: Its name there.
        api_key_env: Environment variable that holds the key; None: OPENAI_API_KEY where it is set, else no key.

    Raises:
        ConfigError: The address is none, holds a password, or the named variable is not set.
    """
    parts = _parts_of(url)
    if not parts.hostname or parts.query or parts.fragment or parts.username or any(letter.isspace() for letter in url):
        raise _no_address(url, "is no address of an API")
    if parts.path.rstrip("/").endswith(ANSWERING_PATHS):
        base = url.rstrip("/")
        base = base.removesuffix(next(path for path in ANSWERING_PATHS if base.endswith(path)))
        rule = "is where the API answers, and not its address: the client adds this path itself"
        raise ConfigError(key="--model", value=url, rule=rule, fix=f"write {base}")
    variable = api_key_env or USUAL_VARIABLE
    key = os.environ.get(variable)
    if api_key_env is not None and not key:
        fix = f"export {api_key_env}=..., or leave --api-key-env out where the endpoint wants no key"
        raise ConfigError(key="--api-key-env", value=api_key_env, rule="is not set in the environment", fix=fix)
    address = f"{parts.scheme}{url[len(parts.scheme) :]}".rstrip("/").removesuffix("/v1").rstrip("/")
    return Endpoint(url=address, model=model, api_key=key or NO_KEY, key_variable=variable if key else None)


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _no_address(url, f"is no address of an API ({error})") from error
    if port == 0:
        raise _no_address(url, "is no address of an API (no server has port 0)")
    return parts


def _no_address(url: str, rule: str) -> ConfigError:
    return ConfigError(key="--model", value=url, rule=rule, fix="write http://HOST:PORT/v1; a key comes from --api-key-env VARIABLE")
