"""The torch engine's own promises, on its core without HTTP, against Hugging Face's forward pass."""

import dataclasses
import json
import queue
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from psrl.engines.contract import PauseMode, TurnRequest
from psrl.engines.torch.architecture import read_architecture
from psrl.engines.torch.core import TorchCore
from psrl.engines.torch.slots import SlotTable
from psrl.engines.torch.weights import Layer, Weights, load_folder
from psrl.errors import EngineError, WeightSyncError
from psrl.parameter_server.layout import read_tensors
from psrl.parameter_server.push import publish_tensors
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.types import SamplingParams
from tests.engines.tiny_models import save_tiny_llama, save_tiny_qwen2, save_tiny_qwen3
from tests.real_models import smollm2_path

WAIT_S = 60


def core_of(folder, *, max_num_seqs=8, max_model_len=512):
    weights = load_folder(Path(folder), read_architecture(Path(folder)), dtype=torch.float32, device=torch.device("cpu"))
    return TorchCore(weights, model_name="m", max_num_seqs=max_num_seqs, num_cache_slots=8, max_model_len=max_model_len, num_threads=1)


@pytest.fixture
def core(qwen3_folder):
    core = core_of(qwen3_folder)
    yield core
    core.close()


def generate(core, prompts, **sampling):
    """All prompts at once; a list under `seeds` gives each its own."""
    seeds = sampling.pop("seeds", range(len(prompts)))
    boxes = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        boxes.append(queue.Queue())
        params = SamplingParams(**{"max_tokens": 24, "seed": seed} | sampling)
        core.submit(TurnRequest(request_id=str(index), token_ids=list(prompt), sampling=params), boxes[-1].put)
    return [box.get(timeout=WAIT_S) for box in boxes]


def reference_logprobs(folder, prompt, sampled, *, temperature=1.0, top_p=1.0, top_k=0):
    """Of the sampled tokens by Hugging Face's forward pass; top-p and top-k by hand, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1] / temperature
    found = []
    for row, token in zip(logits, sampled, strict=True):
        order = row.argsort(descending=True).tolist()
        kept = order[: top_k or len(order)]
        probs = row[kept].softmax(-1).tolist()
        mass, count = 0.0, 0
        while count < len(kept) and mass < top_p:
            mass += probs[count]
            count += 1
        kept = kept[:count]
        assert token in kept, f"token {token} lies outside of top_p={top_p} top_k={top_k}"
        found.append(row[kept].log_softmax(-1)[kept.index(token)].item())
    return found


SAMPLINGS = [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5, "top_p": 0.8}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_logprobs_are_those_of_a_hugging_face_forward_pass(family, sampling, request, tmp_path):
    folder = save_tiny_qwen2(tmp_path, seed=1) if family == "qwen2" else request.getfixturevalue(f"{family}_folder")
    core = core_of(folder)
    try:
        prompts = [[3, 1, 4, 1, 5], [9] * 70, [2]]
        for prompt, turn in zip(prompts, generate(core, prompts, **sampling), strict=True):
            assert turn.logprobs == pytest.approx(reference_logprobs(folder, prompt, turn.token_ids, **sampling), abs=1e-4)
    finally:
        core.close()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=str)
def test_logprobs_agree_on_a_real_model(sampling):
    folder = smollm2_path()
    core = core_of(folder, max_num_seqs=2, max_model_len=64)
    try:
        prompt = [504, 3575, 282, 4649, 314]
        (turn,) = generate(core, [prompt], max_tokens=6, **sampling)
        assert turn.logprobs == pytest.approx(reference_logprobs(folder, prompt, turn.token_ids, **sampling), abs=1e-4)
    finally:
        core.close()


def test_a_greedy_turn_takes_the_likeliest_token_with_logprobs_at_temperature_one(core, qwen3_folder):
    (turn,) = generate(core, [[3, 1, 4]], temperature=0.0, top_p=0.5)
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32)
    expected = model.generate(torch.tensor([[3, 1, 4]]), do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)[0, 3:]
    assert turn.token_ids == expected.tolist()
    assert turn.logprobs == pytest.approx(reference_logprobs(qwen3_folder, [3, 1, 4], turn.token_ids), abs=1e-4)


def test_a_seed_gives_the_same_ids_alone_and_among_others(core):
    (alone,) = generate(core, [[5, 6, 7]], seeds=[11], max_tokens=60)
    crowd = generate(core, [[n, n + 1] * (n + 1) for n in range(10)] + [[5, 6, 7]], seeds=[*range(10), 11], max_tokens=60)
    assert crowd[-1].token_ids == alone.token_ids
    assert len({tuple(turn.token_ids) for turn in crowd}) == 11


def test_sampled_frequencies_are_the_models_probabilities(core, qwen3_folder):
    turns = generate(core, [[8, 3]] * 3000, max_tokens=1)
    counts = torch.bincount(torch.tensor([turn.token_ids[0] for turn in turns]), minlength=64)
    with torch.no_grad():
        probs = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32)(torch.tensor([[8, 3]])).logits[0, -1].softmax(-1)
    # Five standard deviations of a binomial count, and one for tokens that are hardly ever drawn.
    assert ((counts - 3000 * probs).abs() <= 5 * (3000 * probs * (1 - probs)).sqrt() + 1).all()


def test_a_later_turn_computes_only_what_is_new_and_a_group_shares_its_prompt(core):
    (first,) = generate(core, [list(range(40))])
    history = [*range(40), *first.token_ids, 1, 2]
    (second,) = generate(core, [history])
    assert second.cached_tokens == 40 + 24 - 1  # the last sampled token was never fed
    group = generate(core, [[7, 9] * 20] * 6)
    assert sorted(turn.cached_tokens for turn in group) == [0, 39, 39, 39, 39, 39]


def test_the_cache_is_in_use_by_running_turns_and_filled_by_ended_ones_too(qwen3_folder):
    core = core_of(qwen3_folder, max_num_seqs=2, max_model_len=64)
    try:
        generate(core, [[n] * 40 for n in (5, 6, 7)], max_tokens=8)
        load = core.load()
        assert load.cache_usage == 0  # nothing runs
        assert load.cache_filled == pytest.approx(3 * 47 / (10 * 64))  # the last token of a turn has no keys
    finally:
        core.close()
    slots = SlotTable(torch.zeros(1, 2, 4, 1, 20, 1), max_len=10)
    for prompt in (np.arange(6), np.arange(10, 14)):
        slots.num_computed[slots.admit(prompt, slots.match(prompt))] = len(prompt)
    assert (slots.usage(2), slots.filled) == (10 / 20, 10 / 30)
    slots.release(0)
    assert (slots.usage(2), slots.filled) == (4 / 20, 10 / 30)


def test_cached_and_shared_prefixes_change_no_logprob(core, qwen3_folder):
    prompt = [7, 9] * 20
    for turn in generate(core, [prompt] * 12):
        assert turn.logprobs == pytest.approx(reference_logprobs(qwen3_folder, prompt, turn.token_ids), abs=1e-4)
        history = [*prompt, *turn.token_ids, 3, 3, 3]
        (after,) = generate(core, [history], max_tokens=4)
        assert after.cached_tokens >= len(prompt)
        assert after.logprobs == pytest.approx(reference_logprobs(qwen3_folder, history, after.token_ids), abs=1e-4)


def test_a_prompt_longer_than_a_steps_budget_is_computed_in_pieces(qwen3_folder):
    core = core_of(qwen3_folder, max_num_seqs=4, max_model_len=4000)
    try:
        prompts = [[(n * n + salt) % 64 for n in range(3000)] for salt in range(3)] + [[1, 2, 3]]
        for prompt, turn in zip(prompts, generate(core, prompts, max_tokens=5), strict=True):
            assert turn.logprobs == pytest.approx(reference_logprobs(qwen3_folder, prompt, turn.token_ids), abs=1e-3)
    finally:
        core.close()


def test_after_an_update_nothing_of_the_old_weights_is_served(core, tmp_path):
    prompt = list(range(30))
    generate(core, [prompt])
    folder = save_tiny_qwen3(tmp_path, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shared = publish_tensors(model.state_dict(), 3)  # with lm_head.weight, which is tied
    box = queue.Queue()
    core.submit(TurnRequest(request_id="x", token_ids=prompt, sampling=SamplingParams(max_tokens=400, seed=1)), box.put)
    core.pause(PauseMode.KEEP, clear_cache=False).result(WAIT_S)
    core.stage_weights(shared.manifest).result(WAIT_S)
    report = core.commit_weights(3).result(WAIT_S)
    shared.close()
    core.resume().result(WAIT_S)
    assert (report.num_matched, report.num_expected) == (24, 24)  # embedding, final norm, 2 layers of 11
    (fresh,) = generate(core, [prompt])
    assert fresh.versions == [3] * 24
    assert fresh.logprobs == pytest.approx(reference_logprobs(folder, prompt, fresh.token_ids), abs=1e-4)
    running = box.get(timeout=WAIT_S)
    start = running.versions.index(3)
    expected = reference_logprobs(folder, prompt, running.token_ids)
    assert running.logprobs[start:] == pytest.approx(expected[start:], abs=1e-4)


FAMILIES = {"qwen3": save_tiny_qwen3, "qwen2": save_tiny_qwen2, "llama": save_tiny_llama}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_is_served_where_it_lies_and_is_the_models(family, tmp_path):
    folder = FAMILIES[family](tmp_path, seed=6)
    shape = read_architecture(Path(folder))
    shared = publish_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict(), 1)
    buffer = open_version(shared.manifest)
    shared.close()
    given = read_tensors(buffer, shared.manifest)
    mapped, loaded = (
        Weights.of(shape, tensors, dtype=torch.float32, device=torch.device("cpu"))
        for tensors in (given, {name: tensor.clone() for name, tensor in given.items()})
    )
    begin, end = buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes
    for (name, own), (_, other) in zip(parameters_of(mapped), parameters_of(loaded), strict=True):
        assert torch.equal(own, other)
        assert begin <= own.data_ptr() < end or name == "qk_norm"  # a few numbers, laid out for all heads
        assert not begin <= other.data_ptr() < end


def parameters_of(weights):
    fields = [field.name for field in dataclasses.fields(Layer)]
    layers = [(name, getattr(layer, name)) for layer in weights.layers for name in fields]
    others = [(name, getattr(weights, name)) for name in ("embedding", "final_norm", "head")]
    return [*others, *((name, tensor) for name, tensor in layers if tensor is not None)]


def test_an_update_of_another_dtype_is_converted(core, qwen3_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.bfloat16)
    shared = publish_tensors(model.state_dict(), 2)
    core.stage_weights(shared.manifest).result(WAIT_S)
    core.commit_weights(2).result(WAIT_S)
    shared.close()
    (turn,) = generate(core, [[3, 1, 4]])
    model.to(torch.float32).save_pretrained(tmp_path)
    assert turn.logprobs == pytest.approx(reference_logprobs(tmp_path, [3, 1, 4], turn.token_ids), abs=1e-4)


def test_many_updates_while_turns_run_lose_no_token_and_mark_each_with_its_version(core, tmp_path):
    models = [AutoModelForCausalLM.from_pretrained(save_tiny_qwen3(tmp_path / str(n), seed=n), dtype=torch.float32) for n in (7, 8)]
    boxes = [queue.Queue() for _ in range(6)]
    for index, box in enumerate(boxes):
        params = SamplingParams(max_tokens=300, seed=index)
        core.submit(TurnRequest(request_id=str(index), token_ids=[index, 5, 9], sampling=params), box.put)
    for version in range(1, 9):
        shared = publish_tensors(models[version % 2].state_dict(), version)
        core.stage_weights(shared.manifest).result(WAIT_S)
        core.commit_weights(version).result(WAIT_S)  # also without a pause it falls between two steps
        shared.close()
    for index, box in enumerate(boxes):
        turn = box.get(timeout=WAIT_S)
        assert len(turn.token_ids) == len(turn.versions) == 300
        assert turn.versions == sorted(turn.versions)
        for parity in (0, 1):
            rows = [at for at, version in enumerate(turn.versions) if version > 0 and version % 2 == parity]
            expected = reference_logprobs(tmp_path / str((7, 8)[parity]), [index, 5, 9], turn.token_ids)
            assert [turn.logprobs[at] for at in rows] == pytest.approx([expected[at] for at in rows], abs=1e-4)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_an_update_that_does_not_fit_names_the_tensor(core, qwen3_folder, damage):
    tensors = dict(AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).state_dict())
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "unknown":
        tensors["model.extra.weight"] = torch.zeros(2)
    else:
        tensors["model.norm.weight"] = torch.zeros(2)
    shared = publish_tensors(tensors, 1)
    with pytest.raises(WeightSyncError, match=r"model\.(norm|extra)\.weight"):
        core.stage_weights(shared.manifest).result(WAIT_S)
    with pytest.raises(WeightSyncError, match="staged is None"):
        core.commit_weights(1).result(WAIT_S)
    assert core.weight_report().version == 0


def test_an_unsupported_architecture_is_named_with_those_supported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(EngineError, match=r"GPT2LMHeadModel is not supported.*Qwen3ForCausalLM"):
        read_architecture(tmp_path)
