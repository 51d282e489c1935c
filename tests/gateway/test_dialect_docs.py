"""docs/gateway_api.md says of every parameter what the code does with it."""

import json
import re
from pathlib import Path

import pytest

from psrl.gateway.dialects import DIALECTS, anthropic_messages, openai_chat, openai_responses

PAGE = (Path(__file__).parents[2] / "docs" / "gateway_api.md").read_text()
SECTIONS = {
    "OpenAI chat completions": openai_chat.PARAMETERS,
    "Anthropic messages": anthropic_messages.PARAMETERS,
    "OpenAI responses": openai_responses.PARAMETERS,
}


def written_parameters(section):
    """{name: (class, neutral values as written)} of a section's table."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (read|sampling|fixed|ignored) \| (.*) \|$", text, re.MULTILINE)
    found = [(name, (use, neutral)) for use, row in rows for name, neutral in re.findall(r"`(\w+)`(?: \(([^()]*)\))?", row)]
    assert len(found) == len(dict(found)), "a parameter stands twice"
    return dict(found)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_lists_every_parameter_with_its_class_and_neutral_values(section):
    expected = {
        name: (parameter.use.value, " or ".join(json.dumps(neutral) for neutral in parameter.neutral))
        for name, parameter in SECTIONS[section].items()
    }
    assert written_parameters(section) == expected


def test_the_page_lists_every_dialect_at_its_path():
    assert re.findall(r"^\| \w+ [a-z ]+ \| `(/v1[^`]*)`", PAGE, re.MULTILINE) == [dialect.path for dialect in DIALECTS]


def test_the_page_lists_every_code_of_a_bad_request():
    source = "".join(path.read_text() for path in (Path(openai_chat.__file__).parent).glob("*.py"))
    raised = set(re.findall(r'code="(\w+)"', source)) | set(re.findall(r'code: str = "(\w+)"', source))
    assert raised == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
