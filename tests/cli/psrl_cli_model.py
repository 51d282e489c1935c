"""The tokenizer and architecture of retool_tiny with random weights, made in a second."""

from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from psrl.datasets.generators import build_generator
from psrl.recipes.retool_tiny.cold_start import MODEL
from psrl.recipes.tiny_tokenizer import build_tokenizer, conversation_text

NUM_TEXTS = 200


def write_tiny_model(folder: Path) -> Path:
    """A Hugging Face folder; returns it."""
    demonstrations = build_generator("arithmetic").demonstrations(NUM_TEXTS, seed=1)
    tokenizer = build_tokenizer((conversation_text(each) for each in demonstrations), vocab_size=MODEL.vocab_size)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(MODEL.architecture(tokenizer)).save_pretrained(folder)
    return folder
