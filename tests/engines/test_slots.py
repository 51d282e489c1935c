"""The slots of the torch engine under random traffic: every slot holds the keys of the tokens that it says it holds."""

import random

import numpy as np
import pytest
import torch

from psrl.engines.torch.slots import SlotTable, num_slots_of

MAX_LEN = 24


class Traffic:
    """Episodes of several turns on a table whose keys are the tokens themselves."""

    def __init__(self, seed: int, *, max_running: int, num_cache_slots: int) -> None:
        self.random = random.Random(seed)
        self.max_running = max_running
        num_slots = num_slots_of(max_running, num_cache_slots)
        self.slots = SlotTable(torch.zeros(1, 2, num_slots, 1, MAX_LEN, 1), max_len=MAX_LEN)
        self.running: list[list[int]] = []  # as the core has them: index = slot
        self.ended: list[list[int]] = []

    def admit(self) -> None:
        if self.ended and self.random.random() < 0.6:
            before = self.ended.pop(self.random.randrange(len(self.ended)))
        else:
            before = [self.random.randrange(3) for _ in range(3)]
        prompt = (before + [self.random.randrange(5) for _ in range(4)])[: MAX_LEN - 4]
        match = self.slots.match(np.array(prompt))
        slot = self.slots.admit(np.array(prompt), match)
        assert slot == len(self.running)
        assert self.keys(slot, match.num_tokens) == prompt[: match.num_tokens]
        self.slots.keys_values[0, :, slot, 0, : len(prompt), 0] = torch.tensor(prompt, dtype=torch.float32)
        self.slots.num_computed[slot] = len(prompt)
        self.slots.sampling[slot] = (1.0, 1.0, 0, sum(prompt), len(prompt))
        self.slots.logprobs[slot, : len(prompt)] = prompt
        self.running.append(prompt)

    def release(self) -> None:
        slot = self.random.randrange(len(self.running))
        self.slots.release(slot)
        self.ended.append(self.running[slot])
        self.running[slot] = self.running[-1]
        self.running.pop()

    def swap(self) -> None:
        a, b = self.random.sample(range(len(self.running)), 2)
        self.slots.swap(a, b)
        self.running[a], self.running[b] = self.running[b], self.running[a]

    def keys(self, slot: int, count: int) -> list[int]:
        keys, values = self.slots.keys_values[0, :, slot, 0, :count, 0].to(torch.int64).tolist()
        assert keys == values
        return keys

    def check(self) -> None:
        slots = self.slots
        for slot, prompt in enumerate(self.running):
            assert slots.tokens[slot, : len(prompt)].tolist() == prompt == slots.logprobs[slot, : len(prompt)].tolist()
            assert slots.sampling[slot]["seed"] == sum(prompt)
        for slot in range(len(slots.tokens)):
            count = int(slots.num_computed[slot])
            assert self.keys(slot, count) == slots.tokens[slot, :count].tolist()


@pytest.mark.parametrize("num_cache_slots", [0, 1, 5])
def test_a_slot_holds_the_keys_of_its_tokens_whatever_was_admitted_released_and_swapped(num_cache_slots):
    for seed in range(20):
        traffic = Traffic(seed, max_running=4, num_cache_slots=num_cache_slots)
        for _ in range(150):
            acts = [traffic.admit] * (len(traffic.running) < 4) + [traffic.release] * bool(traffic.running)
            traffic.random.choice(acts + [traffic.swap] * (len(traffic.running) > 1))()
            traffic.check()


def test_an_ended_turn_is_found_again_by_its_continuation_and_is_not_copied():
    traffic = Traffic(0, max_running=4, num_cache_slots=4)
    for prompt in ([1] * 8, [2] * 8, [3] * 8):
        slot = traffic.slots.admit(np.array(prompt), traffic.slots.match(np.array(prompt)))
        traffic.slots.num_computed[slot] = 8
    traffic.slots.release(1)
    match = traffic.slots.match(np.array([2] * 8 + [4]))
    assert match.num_tokens == 8
    slot = traffic.slots.admit(np.array([2] * 8 + [4]), match)
    assert traffic.slots.num_computed[slot] == 8
    assert (traffic.slots.num_computed == 8).sum() == 3
