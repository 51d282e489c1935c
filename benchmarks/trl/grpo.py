"""TRL's GRPO trainer with a tool, on tasks and settings given as JSON: the other side of `../beside_trl.py`, in an environment of its own.

Imports nothing of psrl. The tool runs in this process, as TRL's examples have it, without isolation or limits. One JSON line per step
goes to stdout: {"step", "time", "accuracy", "reward", "tokens"}.

    TRL_PYTHON benchmarks/trl/grpo.py SETTINGS.json
"""

import ast
import contextlib
import io
import json
import re
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_schema, qwen3_template

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def code_interpreter(code: str) -> str:
    """
    Run a Python program.

    Args:
        code: The program.
    """
    shown = io.StringIO()
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        names = {}
        with contextlib.redirect_stdout(shown):
            exec(compile(tree, "<program>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names) if last is not None else None
            if value is not None:
                print(repr(value))
    except Exception as error:  # noqa: BLE001 (the program's, whatever it is)
        shown.write(f"{type(error).__name__}: {error}")
    return shown.getvalue().strip()


def final_text(completion):
    last = completion[-1]
    return str(last.get("content") or "") if last.get("role") == "assistant" and not last.get("tool_calls") else ""


def is_right(completion, answer):
    boxes = BOX.findall(final_text(completion))
    return bool(boxes) and boxes[-1].strip() == answer


def reward(completions, answer, **_):
    """psrl's reward of `retool`: 1 for a right box; -1 for none; else -1 and 0.1 for each tool turn, at most -0.6."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        if is_right(completion, right):
            rewards.append(1.0)
        elif not BOX.search(final_text(completion)):
            rewards.append(-1.0)
        else:
            rewards.append(min(-0.6, -1 + 0.1 * sum(message.get("role") == "tool" for message in completion)))
    return rewards


class Steps(TrainerCallback):
    """Prints a line after each step."""

    accuracy = 0.0
    tokens = 0

    def on_step_end(self, args, state, control, **_):
        line = {"step": state.global_step, "time": time.time(), "accuracy": self.accuracy, "tokens": self.tokens}
        print("STEP " + json.dumps(line), flush=True)


def main():
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    if hasattr(tokenizer, "response_template"):
        tokenizer.response_template = qwen3_template
    else:
        tokenizer.response_schema = qwen3_schema
    steps = Steps()

    def counted_reward(completions, answer, completion_ids, **_):
        rewards = reward(completions, answer)
        steps.accuracy = sum(map(is_right, completions, answer)) / len(answer)
        steps.tokens = sum(map(len, completion_ids))
        return rewards

    batch = settings["tasks_per_step"] * settings["group_size"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=counted_reward,
        tools=[code_interpreter],
        train_dataset=Dataset.from_list(settings["tasks"]),
        callbacks=[steps],
        args=GRPOConfig(
            output_dir=settings["output"], use_cpu=True, bf16=False, per_device_train_batch_size=batch,
            num_generations=settings["group_size"],
            max_steps=settings["num_steps"], learning_rate=settings["lr"], lr_scheduler_type="linear",
            warmup_steps=settings["warmup_steps"],
            weight_decay=0.0, max_grad_norm=1.0, beta=0.0, temperature=1.0, top_k=0, top_p=1.0, loss_type="dapo", epsilon=0.2,
            max_completion_length=settings["max_completion_tokens"], max_tool_calling_iterations=settings["max_tool_turns"],
            shuffle_dataset=False, report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True, seed=1,
            gradient_checkpointing=False, dataloader_pin_memory=False,
        ),
    )  # fmt: skip
    print("STEP " + json.dumps({"step": 0, "time": time.time(), "accuracy": None, "tokens": 0}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
