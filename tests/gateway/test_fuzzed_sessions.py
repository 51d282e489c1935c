"""Random agents against a random policy on real tokenizers: what is captured is what the engine saw, and drift is 0.

`make test-slow` plays 10,000 sessions on each of the five tokenizers; the ordinary run plays 100.
"""

from functools import cache

import pytest
from transformers import AutoTokenizer

from psrl.chat import load_renderer
from psrl.chat.parsers import tool_formats
from psrl.gateway.dialects.openai_chat import OpenAIChat
from tests.gateway.fuzzed_sessions import play_many
from tests.real_models import gemma3_tokenizer_path, gpt_oss_tokenizer_path, llama3_1_tokenizer_path, qwen3_tokenizer_path, smollm2_path

FAMILIES = {
    "smollm2": (smollm2_path, "hermes"),
    "qwen3": (qwen3_tokenizer_path, "hermes"),
    "llama3_1": (llama3_1_tokenizer_path, "llama3_json"),
    "gpt_oss": (gpt_oss_tokenizer_path, "harmony"),
    "gemma3": (gemma3_tokenizer_path, "hermes"),
}
NUM_SESSIONS = 100
NUM_SESSIONS_SLOW = 10_000


@cache
def renderer_of(family, history_thinking):
    path, tool_format = FAMILIES[family]
    return load_renderer(str(path()), tool_format=tool_format, history_thinking=history_thinking)


@cache
def vocab_size_of(family):
    return len(AutoTokenizer.from_pretrained(str(FAMILIES[family][0]())))


def play(family, seeds, history_thinking="keep"):
    renderer = renderer_of(family, history_thinking)
    write_call = tool_formats.resolve(FAMILIES[family][1])().call_text
    num_sessions, num_turns, num_leaves, num_continued = play_many(
        renderer, OpenAIChat(), write_call, seeds=seeds, vocab_size=vocab_size_of(family)
    )
    assert num_sessions == len(seeds)
    assert num_turns > 2 * num_sessions
    assert num_leaves > num_sessions, "no session branched: the fuzz does not reach what it is for"
    assert history_thinking == "strip" or num_continued > 0.3 * num_turns, "almost every turn began anew: echoes are not known again"


@pytest.mark.parametrize("history_thinking", ["keep", "strip"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_captured_sequence_is_what_the_engine_saw(family, history_thinking):
    play(family, range(NUM_SESSIONS), history_thinking)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_sessions_have_no_drift(family):
    play(family, range(1_000_000, 1_000_000 + NUM_SESSIONS_SLOW))
