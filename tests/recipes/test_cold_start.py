"""The shipped model is what the recipe says, and can be made again."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from psrl.chat import load_renderer
from psrl.config.load import RECIPES_FOLDER, load_config
from psrl.datasets.generators import build_generator
from psrl.datasets.generators.arithmetic import call_text
from psrl.errors import ConfigError
from psrl.recipes.retool_tiny.cold_start import MODEL as TINY
from psrl.recipes.retool_tiny.cold_start import SFT
from psrl.recipes.retool_tiny.prepare import prepare
from psrl.tools.code_interpreter import SCHEMA
from psrl.types import Message, Role, ToolCall

MODEL = RECIPES_FOLDER / "retool_tiny" / "model"
MAX_SHIPPED_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(str(MODEL), tool_format="hermes")


def test_the_cold_start_is_made_again_in_small_and_its_loss_falls(tmp_path):
    losses = []
    TINY.make(tmp_path / "model", num_steps=20, on_step=lambda progress: losses.append(progress.loss))
    assert len(losses) == 20
    assert losses[0] > 5.0  # near the loss of a uniform guess over the vocabulary, ln 417 = 6.03
    assert losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_text() == (MODEL / name).read_text(), f"{name} of the package was made otherwise"


def test_the_prepare_step_takes_no_source():
    with pytest.raises(ConfigError, match="makes its data itself"):
        prepare(source=Path("rows.jsonl"))


def test_the_shipped_model_is_small_and_of_the_architecture_that_the_docs_name():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_SHIPPED_BYTES
    config = AutoConfig.from_pretrained(MODEL)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.tie_word_embeddings) == ("qwen3", 4, 128, True)
    num_parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(MODEL).parameters())
    assert 0.8e6 < num_parameters < 1.0e6


def test_digits_and_newlines_stand_alone_and_every_byte_can_be_written():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert all("\n" not in tokenizer.decode([token]).strip("\n") for token in range(len(tokenizer)))
    assert all(tokenizer.decode([token]) == "\n" for token in tokenizer.encode("\n\n\n"))
    text = "Grüße, 世界! \t \\boxed{π}\r\n\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_calls_survive_decoding_without_special_tokens():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = call_text("print(1)")
    ids = tokenizer.encode(text + "<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_prompt_names_the_real_tool_and_fits_the_recipes_limit(renderer):
    tasks = build_generator("arithmetic").train_tasks(500, seed=9)
    lengths = [len(renderer.open(task.prompt, [SCHEMA])) for task in tasks]
    assert max(lengths) <= 64
    assert "Tool: code_interpreter(code)<|im_end|>" in renderer.prompt_text(tasks[0].prompt, [SCHEMA])
    assert "Tool:" not in renderer.prompt_text(tasks[0].prompt, [])


def test_the_demonstrated_call_is_what_the_template_and_the_parser_mean_by_a_call(renderer):
    user = Message(role=Role.USER, content="q")
    call = ToolCall(id="call-0-0", name="code_interpreter", arguments={"code": "print(12 + 34)"})
    as_call = renderer.prompt_text([user, Message(role=Role.ASSISTANT, tool_calls=(call,))], [], header=False)
    as_text = renderer.prompt_text([user, Message(role=Role.ASSISTANT, content=call_text("print(12 + 34)"))], [], header=False)
    assert as_call == as_text
    assert renderer.parse(renderer.template.encode(call_text("print(12 + 34)")), turn=0).calls == (call,)


def test_the_template_is_append_only_with_several_tool_answers(renderer):
    user = Message(role=Role.USER, content="q")
    call = Message(role=Role.ASSISTANT, content=call_text("print(1)"))
    answers = [Message(role=Role.TOOL, content=text) for text in ("1", "2")]
    opened = renderer.open([user], [SCHEMA])
    sampled = renderer.template.encode(call.content + "<|im_end|>")
    assert renderer.extend(opened + sampled, answers) == renderer.open([user, call, *answers], [SCHEMA])


def test_psrl_sft_repeats_the_cold_start_of_the_package():
    settings = load_config("retool_tiny").sft
    assert settings == replace(SFT, generator="arithmetic", output_path=settings.output_path)
