"""Fixtures of the trainer's tests."""

import pytest
from training_builders import make_rows, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def rows(tiny_model):
    return make_rows(tiny_model)
