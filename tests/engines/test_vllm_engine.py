"""What the vllm engine promises beside the contract suite: logprobs after updates, seeds, refused versions, its end (make test-vllm)."""

import asyncio
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from psrl.config.rollout import RolloutConfig
from psrl.engine_client.client import HttpGenerator
from psrl.engine_client.whole_turn import whole_turn
from psrl.errors import EngineError
from psrl.parameter_server.push import publish_tensors
from psrl.processes.child import ChildProcess
from psrl.runtime.engines import vllm_python
from psrl.types import FinishReason, GenerateRequest, SamplingParams
from tests.engines.conftest import VLLM_START_S, serve
from tests.engines.test_engine_contract import begun_turn, with_replica
from tests.engines.tiny_models import save_tiny_qwen3

pytestmark = pytest.mark.slow
PROMPT = [3, 1, 4, 1, 5]
SAMPLINGS = [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.0}]


def turn(request_id="v", *, prompt=PROMPT, **sampling):
    params = SamplingParams(**{"max_tokens": 24, "seed": 7} | sampling)
    return GenerateRequest(request_id=request_id, token_ids=list(prompt), session=request_id, sampling=params)


def reference_logprobs(model, prompt, sampled, *, temperature=1.0, top_p=1.0, top_k=0):
    """Of the sampled tokens by Hugging Face's forward pass; top-k and top-p by hand, token by token."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    found = []
    for row, token in zip(logits, sampled, strict=True):
        order = row.argsort(descending=True)
        kept = order[: top_k or len(order)]
        probs = row[kept].softmax(-1)
        kept = kept[: int((probs.cumsum(-1) - probs < top_p).sum())]
        assert token in kept.tolist(), f"token {token} lies outside of top_p={top_p} top_k={top_k}"
        found.append(row[kept].log_softmax(-1)[kept.tolist().index(token)].item())
    return found


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return save_tiny_qwen3(tmp_path_factory.mktemp("other"), seed=5)


async def serve_version(replica, folder):
    """The folder's weights as the next version, as a sync brings them; its number."""
    version = await replica.version() + 1
    shared = publish_tensors(load_file(folder / "model.safetensors"), version)
    await replica.stage_weights(shared.manifest)
    shared.close()  # the trainer may let go of it once it is staged
    await replica.pause("keep")
    report = await replica.finish_weights(version)
    await replica.resume()
    assert report.version == version
    return version


def test_an_adapter_is_added_to_the_weights_of_the_start_and_not_to_those_of_its_predecessor(vllm_url, qwen3_folder):
    """Twice in a row, each time onto the folder's weights."""
    layers = [f"model.layers.{n}.{name}" for n in (0, 1) for name in ("self_attn.k_proj", "mlp.down_proj")]
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def adapter(seed):
        torch.manual_seed(seed)
        sizes = {layer: start[f"{layer}.weight"].shape for layer in layers}
        a = {f"{layer}.lora_A.weight": torch.randn(4, size[1]) for layer, size in sizes.items()}
        return a | {f"{layer}.lora_B.weight": torch.randn(size[0], 4) * 0.1 for layer, size in sizes.items()}

    async def body(replica):
        for seed in (1, 2):
            version = await replica.version() + 1
            shared = publish_tensors(adapter(seed), version)
            staged = await replica.stage_weights(shared.manifest)
            shared.close()
            await replica.finish_weights(version)
            assert staged.num_matched == staged.num_expected == 8
        return await replica.generate(turn())

    sampled = with_replica(vllm_url, body)
    last = adapter(2)
    for layer in layers:
        model.get_parameter(f"{layer}.weight").data = (
            start[f"{layer}.weight"] + last[f"{layer}.lora_B.weight"] @ last[f"{layer}.lora_A.weight"]
        )
    assert sampled.logprobs == pytest.approx(reference_logprobs(model, PROMPT, sampled.token_ids), abs=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_after_an_update_logprobs_are_those_of_a_forward_pass_with_the_new_weights(vllm_url, other_folder, sampling):
    """The embeddings are tied: the head must have been packed again."""

    async def body(replica):
        version = await serve_version(replica, other_folder)
        return version, await replica.generate(turn(**sampling))

    version, sampled = with_replica(vllm_url, body)
    model = AutoModelForCausalLM.from_pretrained(other_folder, dtype=torch.float32)
    assert sampled.policy_versions == [version] * 24
    assert sampled.logprobs == pytest.approx(reference_logprobs(model, PROMPT, sampled.token_ids, **sampling), abs=1e-4)


def test_the_beginning_of_a_prompt_is_not_computed_twice_with_the_same_weights(vllm_url, other_folder):
    async def body(replica):
        await serve_version(replica, other_folder)
        prompt = [n % 60 for n in range(100)]
        return [(await replica.generate(turn(prompt=prompt))).cached_tokens for _ in range(2)]

    first, second = with_replica(vllm_url, body)
    assert (first, second) == (0, 96)  # three blocks of 32


def test_a_seed_gives_the_same_ids_again_and_another_seed_others(vllm_url):
    async def body(replica):
        return await asyncio.gather(*(replica.generate(turn(f"s{n}", seed=seed)) for n, seed in enumerate((7, 7, 8))))

    one, again, other = with_replica(vllm_url, body)
    assert one.token_ids == again.token_ids != other.token_ids


def test_a_turn_that_is_given_back_goes_on_with_other_random_numbers(vllm_url):
    """A rest that was drawn like the beginning would repeat it where the model hardly looks at its context."""

    async def body(replica):
        generator = HttpGenerator([vllm_url], request_timeout_s=60)
        try:
            running = asyncio.create_task(whole_turn(generator, turn("w", max_tokens=600, temperature=1.0)))
            while (await replica.metrics())["psrl_engine_running"] < 1:  # noqa: ASYNC110 (another process counts)
                await asyncio.sleep(0)
            await replica.pause("abort")
            await replica.resume()
            return await running
        finally:
            await generator.close()

    whole = with_replica(vllm_url, body)
    assert (whole.num_resumes, len(whole.token_ids), whole.finish_reason) == (1, 600, FinishReason.LENGTH)


def test_a_version_with_a_tensor_of_another_shape_is_refused_and_the_old_one_is_served(vllm_url, other_folder):
    async def body(replica):
        await serve_version(replica, other_folder)
        before = await replica.generate(turn())
        tensors = load_file(other_folder / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(31)
        shared = publish_tensors(tensors, await replica.version() + 1)
        with pytest.raises(EngineError, match=r"model.norm.weight has shape \(31,\)"):
            await replica.stage_weights(shared.manifest)
        shared.close()
        return before, await replica.generate(turn())

    before, after = with_replica(vllm_url, body)
    assert before.token_ids == after.token_ids
    assert before.logprobs == pytest.approx(after.logprobs, abs=1e-4)


def test_an_update_without_a_pause_happens_between_two_steps_of_running_turns(vllm_url, other_folder):
    async def body(replica):
        old = await replica.version()
        running = await begun_turn(replica, max_tokens=1900)
        shared = publish_tensors(load_file(other_folder / "model.safetensors"), old + 1)
        await replica.stage_weights(shared.manifest)
        await replica.finish_weights(old + 1)
        shared.close()
        return old, await running

    old, sampled = with_replica(vllm_url, body)
    assert (sampled.policy_versions[0], sampled.policy_versions[-1], len(sampled.token_ids)) == (old, old + 1, 1900)


def test_it_ends_with_all_its_processes_when_it_is_told_to_and_dies_when_vllms_engine_dies(qwen3_folder, tmp_path):
    python = vllm_python(RolloutConfig(name="vllm"))
    argv = [python, "-m", "psrl.engines.vllm", "--model-path", str(qwen3_folder), "--max-model-len", "256", "--max-num-seqs", "2"]

    def processes():
        in_group = [int(name) for name in os.listdir("/proc") if name.isdigit() and _group_of(name) == process.pid]
        return [pid for pid in in_group if _title_of(pid)]  # one that has ended and was not yet waited for has none

    async def body():
        await process.start(VLLM_START_S)
        engines = [pid for pid in processes() if "EngineCore" in _title_of(pid)]
        assert len(engines) == 1
        os.kill(engines[0], signal.SIGKILL)
        return await asyncio.wait_for(process.lost(silent_after_s=5.0), 60)

    process = ChildProcess("engine", argv, log_path=tmp_path / "engine.log")
    try:
        assert "answers no /health" in asyncio.run(body())
    finally:
        process.stop()
    deadline = time.monotonic() + 10
    while processes():
        assert time.monotonic() < deadline, "something of vLLM outlived its server"


def _group_of(pid):
    try:
        return os.getpgid(int(pid))
    except ProcessLookupError:
        return None


def _title_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_replica_reports_what_it_serves_from_its_start(vllm_url):
    async def body(replica):
        return await replica.weight_info()

    info = with_replica(vllm_url, body)
    assert info["num_matched"] == info["num_expected"] == 24


@pytest.mark.parametrize("how", [("--pipeline-parallel-size", "2"), ("--no-enforce-eager",)], ids=["two pipeline stages", "compiled"])
def test_an_engine_of_another_shape_serves_and_takes_weights_as_the_plain_one(qwen3_folder, other_folder, tmp_path, how):
    """On CPUs vLLM leaves a later stage without the tensors that it receives its inputs in, unless it compiles (`psrl_begin`)."""

    async def body(replica):
        before = await replica.generate(turn())
        await serve_version(replica, other_folder)
        return before, await replica.generate(turn())

    python = vllm_python(RolloutConfig(name="vllm"))
    argv = [python, "-m", "psrl.engines.vllm", "--model-path", str(qwen3_folder), "--max-model-len", "256", "--max-num-seqs", "2", *how]
    for url in serve(argv, tmp_path, start_s=VLLM_START_S):
        for sampled, folder in zip(with_replica(url, body), (qwen3_folder, other_folder), strict=True):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert sampled.logprobs == pytest.approx(reference_logprobs(model, PROMPT, sampled.token_ids), abs=1e-4)
