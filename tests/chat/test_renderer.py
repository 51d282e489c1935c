"""The renderer on real tokenizers: concatenated turns are the template's own rendering."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from families_under_test import (
    CLOSER,
    END_OF_TURN,
    FAMILIES,
    FOLDERS,
    HEADER,
    SEPARATOR,
    TOOL,
    USER_HEADER,
    real_family,
)
from transformers import AutoTokenizer

from psrl.chat import HfRenderer, load_renderer
from psrl.chat.parsers import HermesFormat
from psrl.chat.probe import Boundary, Verdict
from psrl.chat.template import ChatTemplate
from psrl.errors import ConfigError, TemplateError
from psrl.types import Message, Role, ToolCall, ToolCallError

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CODE = 'x = {"a": "}"}\nprint(f"{x[\'a\']}</tool_call>")  # \\n "quoted"'
SNIPPETS = [
    "",
    " ",
    "\n\n",
    CODE,
    '{"a": [1, {"b": "}"}]}',
    "<tool_response>\n5\n</tool_response>",
    "  two spaces\t",
    "héllo 你好 🙂 e\u0301 ﷽",
    "\u0301",
]
TEXTS = st.sampled_from(SNIPPETS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
# A turn that begins with white space may share a token with its header: then even the template's own ids are not append-only.
SPOKEN = st.just("") | st.builds(lambda first, rest: first + rest, st.sampled_from(["It is", "5", "{", "π", "<"]), TEXTS)
# Qwen3's template takes a user message in these tags for a tool's answer, whoever wrote it.
QUESTIONS = TEXTS.filter(lambda text: not text.startswith("<tool_response>"))
# Qwen3's tags are tokens: in what a tool says they stay text, which the template's own ids would not have (test_markup).
ANSWERS = TEXTS.filter(lambda text: "tool_" not in text)
THOUGHTS = st.none() | st.sampled_from(["I add them.", "First 2.\n\nThen 3."])


def user(content):
    return Message(role=Role.USER, content=content)


def tool(content):
    return Message(role=Role.TOOL, content=content, name=TOOL.name)


@st.composite
def conversations(draw, questions=TEXTS):
    """Messages that begin with a question and end with a question or a tool's answer."""
    messages = [Message(role=Role.SYSTEM, content=draw(TEXTS))] if draw(st.booleans()) else []
    messages.append(user(draw(questions)))
    for turn in range(draw(st.integers(1, 5))):
        num_calls = draw(st.integers(0, 3))
        calls = tuple(ToolCall(id=f"call-{turn}-{i}", name=TOOL.name, arguments={"code": draw(TEXTS)}) for i in range(num_calls))
        messages.append(Message(role=Role.ASSISTANT, content=draw(SPOKEN), tool_calls=calls, reasoning=draw(THOUGHTS)))
        messages += [tool(draw(ANSWERS)) for _ in calls] or [user(draw(questions))]
    return messages


def is_thought(name, said):
    """GPT-OSS's template takes what is said beside a call for reasoning."""
    return said.reasoning or (name == "gpt_oss" and said.tool_calls and said.content)


def turns_of(messages):
    return [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]


@pytest.mark.parametrize("name", FAMILIES)
@FUZZ
@given(messages=conversations(), with_tools=st.booleans())
def test_concatenated_turns_are_the_templates_own_rendering_wherever_it_is_append_only(name, messages, with_tools):
    family = real_family(name)
    tools = [TOOL] if with_tools else []
    whole = family.whole(messages, tools, header=True)
    turns = turns_of(messages)
    if not all(whole.startswith(family.whole(messages[:turn], tools, header=True)) for turn in turns):
        assert not family.report.is_append_only
        first = next(index for index in turns if is_thought(name, messages[index]))
        assert any(message.role is Role.USER for message in messages[first:]), "rewritten for another reason than dropped reasoning"
        return
    whole_ids = family.encode(whole)
    ids = family.renderer.open(messages[: turns[0]], tools)
    for turn, next_turn in zip(turns, [*turns[1:], len(messages)], strict=True):
        end = family.end_of(messages[turn], whole_ids, len(ids))
        ids = family.renderer.extend([*ids, *whole_ids[len(ids) : end]], messages[turn + 1 : next_turn])
        assert ids == whole_ids[: len(ids)]
    assert ids == whole_ids


@pytest.mark.parametrize("name", FAMILIES)
@FUZZ
@given(messages=conversations(QUESTIONS))
def test_a_turn_is_shown_again_as_it_was_written_exactly_where_the_probe_says_so(name, messages):
    family = real_family(name)
    turns = turns_of(messages)
    for turn, next_turn in zip(turns, [*turns[1:], len(messages)], strict=True):
        said = messages[turn]
        boundary = Boundary(
            followers=(Role.TOOL,) * min(2, len(said.tool_calls)) or (Role.USER,),
            has_call=bool(said.tool_calls),
            has_reasoning=said.reasoning is not None,
            is_after_tool_use=not said.tool_calls and messages[turn - 1].role is Role.TOOL,
        )
        written = family.whole(messages[: turn + 1], header=False)
        is_kept = family.whole(messages[:next_turn], header=True).startswith(written)
        assert is_kept == (family.report.case(boundary).verdict is Verdict.EXACT), str(boundary)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_separator_stands_between_a_finished_turn_and_the_next_message(name):
    family = real_family(name)
    ids = [*family.renderer.open([user("2 + 3?")], []), *family.encode("5"), family.end_of_turn_id]
    longer = family.renderer.extend(ids, [user("sure?")])
    added = family.tokenizer.decode(longer[len(ids) :])
    assert longer[: len(ids)] == ids
    assert added.startswith(SEPARATOR[name] + USER_HEADER[name])
    assert added.endswith(HEADER[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_is_closed_by_the_renderer(name):
    family = real_family(name)
    ids = [*family.renderer.open([user("2 + 3?")], []), *family.encode("It is")]
    added = family.tokenizer.decode(family.renderer.extend(ids, [user("go on")])[len(ids) :])
    assert added.startswith(CLOSER[name] + SEPARATOR[name] + USER_HEADER[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_each_of_several_stop_ids_ends_a_turn_and_nothing_closes_it_twice(name):
    family = real_family(name)
    prompt = family.renderer.open([user("2 + 3?")], [])
    assert len(family.renderer.stop_token_ids) >= 2
    assert family.renderer.stop_token_ids[0] == family.end_of_turn_id
    for stop_id in family.renderer.stop_token_ids:
        ids = [*prompt, *family.encode("5"), stop_id]
        assert family.tokenizer.decode(family.renderer.extend(ids, [])[len(ids) :]) == SEPARATOR[name] + HEADER[name]
        assert family.renderer.parse([*family.encode("5"), stop_id], turn=0).content == "5"


def test_stop_ids_of_the_generation_config_count_too(tmp_path):
    for file in FOLDERS["llama3_1"]().iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128008, 128009]}))
    assert load_renderer(str(tmp_path), tool_format="hermes").stop_token_ids == (128009, 128001, 128008)


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_ids_that_no_encoder_would_give_are_kept_as_they_are(name):
    family = real_family(name)
    letter_by_letter = [token for letter in "interpreter" for token in family.encode(letter)]
    assert family.encode("interpreter") != letter_by_letter
    ids = [*family.renderer.open([user("2 + 3?")], [TOOL]), *letter_by_letter, family.end_of_turn_id]
    assert family.renderer.extend(ids, [tool("5")])[: len(ids)] == ids


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_oss"])
def test_several_tool_answers_stand_in_one_user_block(name):
    family = real_family(name)
    ids = [*family.renderer.open([user("2 + 3?")], [TOOL]), *family.encode("x"), family.end_of_turn_id]
    added = family.tokenizer.decode(family.renderer.extend(ids, [tool("5"), tool("6")])[len(ids) :])
    block = "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert added == SEPARATOR[name] + USER_HEADER[name] + block + END_OF_TURN[name] + SEPARATOR[name] + HEADER[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_template_shows_the_tools(name):
    family = real_family(name)
    prompt = family.tokenizer.decode(family.renderer.open([Message(role=Role.SYSTEM, content="Be brief."), user("2 + 3?")], [TOOL]))
    assert prompt.index("Be brief.") < prompt.index("code_interpreter") < prompt.index("2 + 3?")
    assert prompt.count("system") == (0 if name == "gemma3" else 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_that_another_writer_put_between_sampled_turns_are_rendered_as_the_template_does(name):
    family = real_family(name)
    question = [user("2 + 3?")]
    written = [
        user("and in words?"),
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="call-9-0", name=TOOL.name, arguments={"code": "print(5)"}),)),
        tool("5"),
        Message(role=Role.ASSISTANT, content="Five."),
        user("sure?"),
    ]
    sampled = [*family.encode("5"), family.end_of_turn_id]
    ids = [*family.renderer.open(question, [TOOL]), *sampled]
    said = Message(role=Role.ASSISTANT, content="5")
    whole = family.encode(family.whole([*question, said, *written], [TOOL], header=True))
    added = family.renderer.following(ids[-1], written)
    assert whole[len(whole) - len(added) :] == added
    if name != "gpt_oss":  # whose sampled turn has no channel here
        assert [*ids, *added] == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_of_no_ids_is_closed_and_answered_too(name):
    family = real_family(name)
    added = family.tokenizer.decode(family.renderer.following(None, [user("go on")]))
    assert added.startswith(CLOSER[name] + SEPARATOR[name] + USER_HEADER[name])


def test_a_first_prompt_that_is_asked_for_again_is_the_same_and_nobody_elses():
    renderer = real_family(FAMILIES[0]).renderer
    first = renderer.open([user("2 + 3?")], [])
    first.append(7)  # What was given belongs to who asked.
    assert renderer.open((user("2 + 3?"),), ()) == first[:-1]
    assert renderer.open([user("2 + 3?")], [TOOL]) != first[:-1]
    assert renderer.open([user("2 + 4?")], []) != first[:-1]
    assert renderer.open([user("2 + 3?")], []) == first[:-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_has_the_beginning_of_text_that_its_template_writes_and_no_other(name):
    family = real_family(name)
    bos = {"llama3_1": "<|begin_of_text|>", "gemma3": "<bos>"}.get(name)
    ids = family.renderer.open([user("2 + 3?")], [])
    if bos is None:
        assert ids[0] == family.encode(HEADER[name])[0]
        return
    bos_id = family.tokenizer.convert_tokens_to_ids(bos)
    assert [position for position, token_id in enumerate(ids) if token_id == bos_id] == [0]
    assert bos_id not in family.renderer.following(ids[-1], [user("sure?")])


def test_gpt_oss_ends_turns_by_return_and_call_and_not_by_the_end_of_a_channel():
    family = real_family("gpt_oss")
    end, call, returned = family.tokenizer.convert_tokens_to_ids(["<|end|>", "<|call|>", "<|return|>"])
    assert {call, returned} <= set(family.renderer.stop_token_ids)
    assert end not in family.renderer.stop_token_ids
    for last in (returned, call, end):
        added = family.tokenizer.decode(family.renderer.following(last, [user("sure?")]))
        assert added == "<|start|>user<|message|>sure?<|end|><|start|>assistant"


def test_gpt_oss_names_the_tool_that_answers():
    family = real_family("gpt_oss")
    stop = family.renderer.stop_token_ids[1]
    named = family.tokenizer.decode(family.renderer.following(stop, [tool("5")]))
    assert named == '<|start|>functions.code_interpreter to=assistant<|channel|>commentary<|message|>"5"<|end|><|start|>assistant'
    unnamed = family.tokenizer.decode(family.renderer.following(stop, [Message(role=Role.TOOL, content="5")]))
    assert unnamed.startswith("<|start|>functions.unknown to=assistant")


def test_a_template_that_prints_today_prints_the_date_of_its_options():
    path = str(FOLDERS["gpt_oss"]())
    fixed = load_renderer(path, tool_format="hermes", template_options={"current_date": "2026-02-03", "reasoning_effort": "high"})
    prompt = fixed.decode(fixed.open([user("2 + 3?")], []))
    assert "Current date: 2026-02-03\n" in prompt
    assert "Reasoning: high" in prompt
    assert "Current date: 2025-01-01\n" in real_family("gpt_oss").renderer.prompt_text([user("2 + 3?")], [])
    with pytest.raises(TemplateError, match="current_date"):
        load_renderer(path, tool_format="hermes", template_options={"current_date": "today"})


@pytest.mark.parametrize(
    ("messages", "joined"),
    [
        ([tool("5"), user("go on")], "<tool_response>\n5\n</tool_response>\n\ngo on"),
        ([user("a"), user("b")], "a\n\nb"),
        ([Message(role=Role.SYSTEM, content="Be brief."), user("b")], "Be brief.\n\nb"),
    ],
)
def test_gemma_is_never_given_two_user_messages_in_a_row(messages, joined):
    family = real_family("gemma3")
    added = family.tokenizer.decode(family.renderer.following(family.end_of_turn_id, messages))
    assert added == f"\n<start_of_turn>user\n{joined}<end_of_turn>\n<start_of_turn>model\n"


def test_a_system_message_that_a_template_would_lose_is_shown_as_the_users():
    family = real_family("gpt_oss")
    later = [Message(role=Role.SYSTEM, content="Be brief."), user("b")]
    added = family.tokenizer.decode(family.renderer.following(family.end_of_turn_id, later))
    assert "<|start|>user<|message|>Be brief.<|end|>" in added
    opened = family.tokenizer.decode(family.renderer.open(later, []))
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in opened


class RecordingTemplate(ChatTemplate):
    """A real template that notes how much it was given to do."""

    def __init__(self, tokenizer):
        self.num_messages = []
        self.num_characters = []
        super().__init__(tokenizer)

    def text(self, messages, tools=(), *, header):
        self.num_messages.append(len(messages))
        return super().text(messages, tools, header=header)

    def encode(self, text):
        self.num_characters.append(len(text))
        return super().encode(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_work_of_a_turn_does_not_grow_over_128_turns(name):
    template = RecordingTemplate(real_family(name).tokenizer)
    renderer = HfRenderer(template, tool_format=HermesFormat())
    ids = renderer.open([user("2 + 3?")], [TOOL])
    template.num_messages.clear()
    template.num_characters.clear()
    for _ in range(128):
        ids = renderer.extend([*ids, *([70] * 50), renderer.stop_token_ids[0]], [tool("5")])
    assert len(set(template.num_messages)) == 1
    assert len(set(template.num_characters)) == 1
    assert max(template.num_messages) == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sampled_turn_is_read_into_reasoning_content_and_calls(name):
    family = real_family(name)
    text = (
        "<think>\nadd\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(\'</tool_call>\')"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": }}\n</tool_call>'
    )
    parsed = family.renderer.parse([*family.encode(text), family.end_of_turn_id], turn=3)
    assert (parsed.reasoning, parsed.content) == ("add", "Let me see.")
    good, bad = parsed.calls
    assert good == ToolCall(id="call-3-0", name="code_interpreter", arguments={"code": "print('</tool_call>')"})
    assert isinstance(bad, ToolCallError)
    assert (bad.id, bad.cause) == ("call-3-1", "invalid_json")
    assert parsed.text == text + END_OF_TURN[name]


def test_template_options_reach_the_template():
    quiet = load_renderer(str(FOLDERS["qwen3"]()), tool_format="hermes", template_options={"enable_thinking": False})
    assert quiet.family.header == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert not quiet.family.opens_reasoning


def test_strip_asks_for_a_branch_where_reasoning_would_be_dropped_and_keep_never_does():
    path = str(FOLDERS["qwen3"]())
    thought = [user("2 + 3?"), Message(role=Role.ASSISTANT, content="5", reasoning="add")]
    silent = [user("2 + 3?"), Message(role=Role.ASSISTANT, content="5")]
    strip = load_renderer(path, tool_format="hermes", history_thinking="strip")
    assert strip.begins_branch(thought, [user("sure?")])
    assert not strip.begins_branch(thought, [tool("5")])
    assert not strip.begins_branch(silent, [user("sure?")])
    assert not strip.begins_branch([*thought, user("sure?"), silent[1]], [user("really?")])
    assert not load_renderer(path, tool_format="hermes").begins_branch(thought, [user("sure?")])


def test_a_header_that_opens_the_reasoning_makes_a_turn_begin_inside_it():
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS["qwen3"]())
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    renderer = HfRenderer(ChatTemplate(tokenizer), tool_format=HermesFormat())
    assert renderer.family.opens_reasoning
    parsed = renderer.parse(tokenizer.encode("add\n</think>\n\n5<|im_end|>"), turn=0)
    assert (parsed.reasoning, parsed.content) == ("add", "5")


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"tool_format": "no_such"}, "rollout.multi_turn.format"),
        ({"tool_format": "hermes", "history_thinking": "maybe"}, "model.history_thinking"),
    ],
)
def test_unknown_names_are_errors_that_name_the_setting(wrong, key):
    with pytest.raises(ConfigError) as raised:
        load_renderer(str(FOLDERS["qwen3"]()), **wrong)
    assert raised.value.key == key


def test_a_folder_without_a_tokenizer_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_renderer(str(tmp_path), tool_format="hermes")


def test_a_tokenizer_without_a_chat_template_is_an_error_that_says_so():
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS["qwen3"]())
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="has no chat template"):
        ChatTemplate(tokenizer)
