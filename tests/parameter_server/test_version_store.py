"""The version store: what is visible when, and what the dead may not do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psrl.errors import WeightSyncError
from psrl.parameter_server.layout import lay_out
from psrl.parameter_server.versions import VersionStore


def manifest_of(version):
    return lay_out([], version=version)


def push(store, version, *, now_s=0.0):
    return store.commit_push(store.begin_push(version, now_s=now_s), manifest_of(version), f"ref{version}", now_s=now_s)


def test_a_push_is_seen_only_after_its_commit_and_the_oldest_falls_out():
    store = VersionStore[str](keep=2)
    with pytest.raises(WeightSyncError, match="no version"):
        store.latest()
    for version in (1, 2):
        lease = store.begin_push(version, now_s=0)
        assert version not in store.versions
        assert store.commit_push(lease, manifest_of(version), f"ref{version}", now_s=0) == tuple(range(1, version + 1))
    store.abort_push(store.begin_push(3, now_s=0))
    assert store.latest().reference == "ref2"
    assert push(store, 3) == (2, 3)
    with pytest.raises(WeightSyncError, match="not held"):
        store.get(1)


def test_a_push_that_was_given_up_or_taken_over_cannot_be_committed():
    store = VersionStore[str](keep=1, lease_s=10)
    dead = store.begin_push(1, now_s=0)
    with pytest.raises(WeightSyncError, match="must wait"):
        store.begin_push(1, now_s=9.9)
    alive = store.begin_push(1, now_s=10)
    store.abort_push(dead)  # of a writer that woke up: not its push any more
    with pytest.raises(WeightSyncError, match="its push is over"):
        store.commit_push(dead, manifest_of(1), "old", now_s=11)
    with pytest.raises(WeightSyncError, match="its push is over"):
        store.commit_push(alive, manifest_of(2), "another version", now_s=11)
    store.commit_push(alive, manifest_of(1), "new", now_s=11)
    assert store.latest().reference == "new"
    with pytest.raises(WeightSyncError, match="not newer"):
        store.begin_push(1, now_s=12)


def test_readers_do_not_hold_up_a_push_and_keep_their_version():
    store = VersionStore[str](keep=1, lease_s=10)
    push(store, 1)
    one, stored = store.begin_pull(now_s=0)
    two, _ = store.begin_pull(1, now_s=0)
    assert stored.reference == "ref1"
    assert push(store, 2) == (1, 2)
    store.end_pull(one, now_s=1)
    assert store.versions == (1, 2)
    store.end_pull(two, now_s=1)
    store.end_pull(two, now_s=1)
    assert store.versions == (2,)


def test_a_reader_that_died_holds_its_version_for_no_longer_than_its_lease():
    store = VersionStore[str](keep=1, lease_s=10)
    push(store, 1)
    store.begin_pull(now_s=0)
    assert push(store, 2, now_s=9) == (1, 2)
    assert push(store, 3, now_s=10) == (3,)


class Stores(RuleBasedStateMachine):
    """Any order of pushes, pulls, deaths and time: what is pulled is complete, what is read stays, what nobody needs goes."""

    def __init__(self):
        super().__init__()
        self.store, self.now_s, self.version = VersionStore[int](keep=2, lease_s=5), 0.0, 0
        self.pushes, self.pulls, self.committed = [], {}, []

    @rule(seconds=st.floats(0, 4))
    def time_goes_on(self, seconds):
        self.now_s += seconds

    @rule()
    def begin_push(self):
        try:
            self.pushes.append((self.store.begin_push(self.version + 1, now_s=self.now_s), self.version + 1, self.now_s))
        except WeightSyncError:
            assert self.pushes and self.now_s < self.pushes[-1][2] + 5

    @rule(which=st.integers(0, 5), aborts=st.booleans())
    def end_push(self, which, aborts):
        if not self.pushes:
            return
        lease, version, _ = self.pushes[which % len(self.pushes)]
        is_current = (lease, version) == self.pushes[-1][:2]
        if aborts:
            self.store.abort_push(lease)
        else:
            try:
                self.store.commit_push(lease, manifest_of(version), version, now_s=self.now_s)
                assert is_current
                self.version = version
                self.committed.append(version)
            except WeightSyncError:
                assert not is_current
        if is_current:
            self.pushes = []

    @rule()
    def begin_pull(self):
        if self.committed:
            lease, stored = self.store.begin_pull(now_s=self.now_s)
            assert stored.reference == self.committed[-1]
            self.pulls[lease] = (stored.reference, self.now_s)

    @rule(which=st.integers(0, 5))
    def end_pull(self, which):
        if self.pulls:
            lease = list(self.pulls)[which % len(self.pulls)]
            self.store.end_pull(lease, now_s=self.now_s)
            del self.pulls[lease]

    @invariant()
    def what_is_needed_is_held_and_nothing_else_was_ever_visible(self):
        held = self.store.versions
        assert set(self.committed[-2:]) <= set(held) <= set(self.committed)
        assert {version for version, began in self.pulls.values() if self.now_s < began + 5} <= set(held)


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
