"""Addresses of APIs are read strictly: what is none is refused with what to write instead."""

import pytest

from psrl.cli.main import main
from psrl.config.endpoint import is_endpoint, read_endpoint, refuse_address_without_scheme
from psrl.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://host:99999/v1", "Port out of range"),
        ("http://host:0", "port 0"),
        ("http://host:port", "is no address of an API"),
        ("http:///nothing", "is no address of an API"),
        ("http://user:word@host", "is no address of an API"),
        ("http://a b/v1", "is no address of an API"),
        ("http://host:8000/v1/chat/completions", r"write http://host:8000/v1$"),
        ("https://host/v1/completions/", r"write https://host/v1$"),
    ],
)
def test_what_is_no_address_is_refused(url, rule):
    with pytest.raises(ConfigError, match=rule):
        read_endpoint(url, model=None, api_key_env=None)


@pytest.mark.parametrize("url", ["HTTP://Host:8000/v1", "http://Host:8000", "http://Host:8000/v1/", "http://Host:8000/"])
def test_an_address_is_one_with_and_without_v1_and_in_any_case_of_its_scheme(url):
    assert is_endpoint(url)
    assert read_endpoint(url, model=None, api_key_env=None).url == "http://Host:8000"


def test_an_ipv6_address_is_one():
    assert read_endpoint("http://[::1]:8000/v1", model="m", api_key_env=None).url == "http://[::1]:8000"


@pytest.mark.parametrize("text", ["127.0.0.1:8000/v1", "localhost:8000", "[::1]:8000/v1", "ws://host/v1"])
def test_an_address_without_its_scheme_is_no_folder(text, capsys):
    with pytest.raises(SystemExit) as info:
        main(["eval", "retool_tiny", "--model", text])
    assert info.value.code == 2
    printed = capsys.readouterr().err
    assert "begins with http:// or https://" in printed and f"write http://{text.removeprefix('ws://')}" in printed


def test_a_folder_with_a_colon_in_its_name_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model:8").mkdir()
    refuse_address_without_scheme("model:8")
    refuse_address_without_scheme("models/own")


def test_the_key_is_known_by_its_variable_and_not_shown(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-123")
    endpoint = read_endpoint("http://host", model=None, api_key_env="MY_KEY")
    assert (endpoint.api_key, endpoint.key_variable) == ("secret-123", "MY_KEY")
    assert "secret-123" not in repr(endpoint)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_endpoint("http://host", model=None, api_key_env=None).key_variable is None
