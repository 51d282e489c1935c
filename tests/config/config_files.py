"""A recipe that passes every check, in a folder of a test: wrong ones are made by one change."""

import json
from pathlib import Path

MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
RECIPE = """
train_actor_rollout_ref:
  model: {{path: {folder}/model}}
data:
  train_files: [{folder}/rows.jsonl]
  max_prompt_length: 256
gen_actor_rollout_ref:
  rollout:
    prompt_length: 256
    multi_turn: {{enable: true, max_turns: 4}}
    agent: {{default_agent_loop: multi_turn_agent, env: {{name: tool_env}}, data: {{name: tool_agent_data}}}}
sft: {{generator: arithmetic, num_steps: 100}}
"""


def write_recipe(folder: Path, more: str = "") -> Path:
    """`more` is YAML appended to the recipe; returns its path."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1?"}]}\n')
    path = folder / "mine.yaml"
    path.write_text(RECIPE.format(folder=folder) + more)
    return path
