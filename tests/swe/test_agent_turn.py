"""Turns and answers are read as mini-swe-agent itself reads them: its own functions say what is expected."""

import json
from types import SimpleNamespace

import pytest
from calc_project import TEXT_YAML
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.agent_yaml import AgentYaml
from psrl.swe.agent_turn import CommandAnswer, read_turn, render
from psrl.types import ParsedTurn, ToolCall, ToolCallError

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TEMPLATE = "{{error}}|{{actions|length}}|{{finish_reason}}|{{has_tool_calls is defined and has_tool_calls}}"
PIECES = ["```sh\nls\n```", "```sh\n  a\n\nb \n```", "```sh\n", "\n```", "```", "sh", "x", "{{ 7 }}", "\n", "é\u2028"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
PRINTED = [SUBMIT, f"{SUBMIT} ", f"x{SUBMIT}", " ", "\n", "\r\n", "\u2028", "\x0b", "\x1c", "diff", "\t"]
OUTPUTS = st.lists(st.sampled_from(PRINTED), max_size=6).map("".join)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """mini-swe-agent's functions, imported without its greeting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSWEA_SILENT_STARTUP", "1")
        patch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path_factory.mktemp("mini")))
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.exceptions import FormatError, Submitted
        from minisweagent.models.utils.actions_text import parse_regex_actions
        from minisweagent.models.utils.actions_toolcall import parse_toolcall_actions
    return SimpleNamespace(
        environment=LocalEnvironment(), text=parse_regex_actions, calls=parse_toolcall_actions, FormatError=FormatError, Submitted=Submitted
    )


def settings_of(model_class):
    model = {**TEXT_YAML["model"], "model_class": model_class, "format_error_template": TEMPLATE}
    return AgentYaml(path="", task_kind="t", system_template="", instance_template="", **model)


def expected_of(theirs, parse, *given, **more):
    """(commands, what the policy is told)"""
    try:
        actions = parse(*given, format_error_template=TEMPLATE, **more)
    except theirs.FormatError as error:
        return (), error.messages[0]["content"]
    return tuple(action["command"] for action in actions), None


@given(text=TEXTS)
def test_commands_in_text_are_those_that_mini_swe_agent_finds(theirs, text):
    settings = settings_of("litellm_textbased")
    action = read_turn(ParsedTurn(content=text, reasoning=None, calls=(), text=text), settings, finish_reason="stop")
    expected = expected_of(theirs, theirs.text, text, action_regex=settings.action_regex, template_kwargs={"finish_reason": "stop"})
    assert (action.commands, action.format_error) == expected


CALLS = st.lists(
    st.builds(
        ToolCall,
        id=st.sampled_from(["call-0-0", "call-0-1"]),
        name=st.sampled_from(["bash", "bash", "bash", "sh", ""]),
        arguments=st.dictionaries(st.sampled_from(["command", "command", "cmd"]), st.sampled_from(["ls", "", "{{ 7 }}", 3, None, ["a"]])),
    ),
    max_size=4,
)


@given(calls=CALLS)
def test_tool_calls_are_read_as_mini_swe_agent_reads_them(theirs, calls):
    openai = [SimpleNamespace(id=call.id, function=SimpleNamespace(name=call.name, arguments=json.dumps(call.arguments))) for call in calls]
    parsed = ParsedTurn(content="", reasoning=None, calls=tuple(calls), text="")
    action = read_turn(parsed, settings_of("litellm"), finish_reason="tool_calls")
    expected = expected_of(theirs, theirs.calls, openai, template_kwargs={"finish_reason": "tool_calls"})
    assert (action.commands, action.format_error) == expected
    assert action.call_ids == (() if action.format_error else tuple(call.id for call in calls))


def test_a_call_that_cannot_be_read_is_told_in_the_agents_words():
    broken = ToolCallError(id="call-0-0", cause="invalid_json", message="the arguments are no JSON", written="{")
    parsed = ParsedTurn(content="", reasoning=None, calls=(broken,), text="{")
    action = read_turn(parsed, settings_of("litellm"), finish_reason="stop")
    assert action.format_error == "Error parsing tool call arguments: the arguments are no JSON.|0|stop|True"


@given(output=OUTPUTS, returncode=st.sampled_from([0, 0, 1, -1]))
def test_a_submission_is_what_mini_swe_agent_takes_for_one(theirs, output, returncode):
    try:
        theirs.environment._check_finished({"output": output, "returncode": returncode, "exception_info": ""})
        expected = None
    except theirs.Submitted as done:
        expected = done.messages[0]["extra"]["submission"]
    assert CommandAnswer(output=output, returncode=returncode).submission == expected


def test_what_a_command_printed_is_never_a_template():
    assert render("<{{output.output}}>", {"output": {"output": "{{ 7 * 6 }}{% for x in y %}"}}) == "<{{ 7 * 6 }}{% for x in y %}>"
