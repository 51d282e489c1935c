"""A cluster that cannot be joined."""

import socket
import time

import pytest

from psrl.config.load import load_config
from psrl.errors import ConfigError
from psrl.runtime.cluster import plan_of_cluster


def test_what_is_no_address_of_a_cluster_is_refused_by_its_setting():
    config = load_config("retool_tiny", ["psrl.ray_address=nonsense"])
    with pytest.raises(ConfigError, match=r"psrl\.ray_address.*nonsense.*no Ray cluster answers"):
        plan_of_cluster(config)


@pytest.mark.parametrize("address", ["127.0.0.1:{free}", "127.0.0.1:70000"])
def test_an_address_at_which_nobody_listens_is_refused_at_once(address):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = address.format(free=probe.getsockname()[1])
    config, began = load_config("retool_tiny", [f"psrl.ray_address='{address}'"]), time.monotonic()
    with pytest.raises(ConfigError, match=rf"psrl\.ray_address.*{address}.*no Ray cluster answers"):
        plan_of_cluster(config)
    assert time.monotonic() - began < 5.0
