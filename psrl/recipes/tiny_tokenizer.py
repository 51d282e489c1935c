"""The tokenizer of tiny models: byte-level BPE with single digits, ChatML and Hermes tokens.

Tokens may span words (up to MAX_TOKEN_CHARS), because every token of an episode costs time on two cores; they never span a digit,
a newline or a name (where a recipe has names that its model must copy: those are written the same wherever they stand). The newline
rule keeps turns exact: an assistant's header ends with one, so text that follows is tokenised the same with and without the header
before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from psrl.datasets.demonstrations import Demonstration

MAX_TOKEN_CHARS = 16
MODEL_MAX_LENGTH = 1024
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
HERMES_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# ChatML with Hermes calls, append-only. Tools are named by signature: the tiny model has no use for a description.
CHAT_TEMPLATE = """\
{%- set offer -%}
{%- for tool in tools or [] -%}
{{- '\\nTool: ' + tool.function.name + '(' + tool.function.parameters.properties.keys() | join(', ') + ')' }}
{%- endfor -%}
{%- endset -%}
{%- if messages[0].role != 'system' and offer %}{{- '<|im_start|>system' + offer + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if loop.first and message.role == 'system' %}{{- offer }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}
"""


def build_tokenizer(texts: Iterable[str], *, vocab_size: int, names: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train the tokenizer on rendered conversations; the same texts give the same tokenizer.

    Args:
        texts: As `conversation_text` writes them.
        vocab_size: Most tokens, the Hermes tokens not counted.
        names: Words of small letters that stand alone.
    """
    bpe = Tokenizer(models.BPE())
    alone = [pre_tokenizers.Split("\n", behavior="isolated")]
    if names:
        alone.append(pre_tokenizers.Split(Regex(rf"(?<![a-z])(?:{'|'.join(names)})(?![a-z])"), behavior="isolated"))
    alone.append(pre_tokenizers.Digits(individual_digits=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*alone, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=20,
        max_token_length=MAX_TOKEN_CHARS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    special = re.compile("|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *HERMES_TOKENS)))
    bpe.train_from_iterator((part for text in texts for part in special.split(text)), trainer)
    # Not special: what a turn's text shows of a call must survive decoding without special tokens, as with Qwen3.
    bpe.add_tokens([AddedToken(token, normalized=False, special=False) for token in HERMES_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def conversation_text(demonstration: Demonstration) -> str:
    """A conversation as the chat template writes it, for training the tokenizer."""
    rendered, _ = render_jinja_template(
        conversations=[[message.to_template() for message in demonstration.messages]],
        tools=[tool.to_template() for tool in demonstration.tools] or None,
        chat_template=CHAT_TEMPLATE,
    )
    return rendered[0]
