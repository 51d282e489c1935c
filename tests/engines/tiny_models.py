"""Random models of a few thousand parameters with peaked distributions, as Hugging Face folders."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}


def save_tiny_qwen3(folder, *, seed):
    torch.manual_seed(seed)
    # 32 is the narrowest head that vLLM computes on CPUs.
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def save_tiny_qwen2(folder, *, seed):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def save_tiny_llama(folder, *, seed):
    """With Llama 3.1's rope scaling, at lengths where it matters."""
    torch.manual_seed(seed)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, tie_word_embeddings=False)).save_pretrained(folder)
    return folder
