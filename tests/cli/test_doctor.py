"""`psrl doctor` says what works and how to mend what does not."""

import dataclasses

import pytest
from psrl_cli_model import write_tiny_model

from psrl.config.load import load_config
from psrl.config.sandbox import SandboxConfig
from psrl.errors import SandboxUnavailableError
from psrl.runtime import doctor
from psrl.runtime.doctor import (
    CheckFailed,
    check_disk,
    check_docker,
    check_engine,
    check_machine,
    check_sandbox,
    check_smg,
    check_tokenizer,
    run_checks,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = folder / "mine.yaml"
    path.write_text(
        f"data: {{generator: {{name: arithmetic}}}}\ntrain_actor_rollout_ref: {{model: {{path: {write_tiny_model(folder)}}}}}\n"
    )
    return load_config(str(path), ["gen_actor_rollout_ref.rollout.max_num_seqs=4"])


def test_the_machine_is_compared_with_the_plan(config):
    assert "GiB are free" in check_machine(config)


def test_a_full_disk_is_named(config, monkeypatch):
    assert "GiB free" in check_disk(config)
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_BYTES", 2**60)
    with pytest.raises(CheckFailed, match="GiB left"):
        check_disk(config)


def test_the_tokenizer_keeps_the_contract(config):
    assert "append-only: yes" in check_tokenizer(config)


def test_the_sandbox_prints_five(config):
    assert "printed 5" in check_sandbox(config)


def test_the_docker_engine_is_asked_where_the_recipe_uses_one(config, docker_engine, tmp_path):
    assert check_docker(config) == "one answers; this recipe does without"
    uses = dataclasses.replace(config, sandbox=SandboxConfig(backend="docker"))
    assert "containers run" in check_docker(uses)
    assert "docker: print(2+3) printed 5" in check_sandbox(uses)
    missing = dataclasses.replace(config, sandbox=SandboxConfig(backend="docker", engine_url=f"unix://{tmp_path}/none.sock"))
    with pytest.raises(SandboxUnavailableError, match=r"no Docker Engine answers.*Fix: start it"):
        check_docker(missing)


def test_the_engine_answers(config):
    assert "4 tokens after a prompt" in check_engine(config)


def test_smg_answers(config):
    assert "ready in" in check_smg(config)


def test_a_broken_part_is_a_line_with_a_fix_and_the_others_still_run(config, monkeypatch):
    model = dataclasses.replace(config.train_actor_rollout_ref.model, path="/nowhere")
    broken = dataclasses.replace(config, train_actor_rollout_ref=dataclasses.replace(config.train_actor_rollout_ref, model=model))
    monkeypatch.setattr(doctor, "check_transfer_queue", lambda config: "not asked here: starts Ray")
    results = {result.name: result for result in run_checks(broken)}
    assert {name for name, result in results.items() if not result.is_ok} == {"cores and memory", "tokenizer contract", "engine"}
    assert all(result.fix for result in results.values() if not result.is_ok)
    assert results["sandbox"].is_ok


@pytest.mark.slow
def test_every_check_passes_where_everything_is_installed(config):
    assert [result.name for result in run_checks(config) if not result.is_ok] == []
