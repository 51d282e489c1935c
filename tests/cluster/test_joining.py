"""A cluster that cannot be joined."""

import pytest

from psrl.config.load import load_config
from psrl.errors import ConfigError
from psrl.runtime.cluster import plan_of_cluster


def test_what_is_no_address_of_a_cluster_is_refused_by_its_setting():
    config = load_config("retool_tiny", ["psrl.ray_address=nonsense"])
    with pytest.raises(ConfigError, match=r"psrl\.ray_address.*nonsense.*no Ray cluster answers"):
        plan_of_cluster(config)
