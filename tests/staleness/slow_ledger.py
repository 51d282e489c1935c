"""The rules of the ledger by trying every assignment of groups to slots: slow, and without the arithmetic of the real one."""


def num_matched(deadlines: list[int], slots: dict[int, int]) -> int:
    """Most groups that can have a slot each, in a buffer up to their deadline (augmenting paths)."""
    owner: dict[tuple[int, int], int] = {}
    all_slots = [(v, number) for v, count in slots.items() for number in range(count)]

    def find(group: int, seen: set) -> bool:
        for slot in all_slots:
            if slot[0] <= deadlines[group] and slot not in seen:
                seen.add(slot)
                if slot not in owner or find(owner[slot], seen):
                    owner[slot] = group
                    return True
        return False

    return sum(find(group, set()) for group in range(len(deadlines)))


class SlowLedger:
    """As StalenessLedger, without states and snapshots."""

    def __init__(self, *, staleness, groups_per_buffer, version, redundant_groups, last_version):
        self.staleness, self.quota, self.spare = staleness, groups_per_buffer, redundant_groups
        self.version, self.last, self.is_consumed = version, last_version, False
        self.in_flight: dict[str, int] = {}
        self.occupied: dict[int, list[str]] = {}
        self.redundant: dict[int, int] = {}
        self._open()

    def _open(self):
        for v in range(self.version, min(self.version + self.staleness + 1, self.last)):
            self.occupied.setdefault(v, [])

    def slots(self, *, to_promise):
        full = {v: 0 if to_promise else self.redundant.get(v, 0) for v in self.occupied}
        return {v: full[v] if len(groups) == self.quota else self.quota + self.spare - len(groups) for v, groups in self.occupied.items()}

    def deadlines(self):
        return [admitted + self.staleness for admitted in self.in_flight.values()]

    def fits(self):
        return num_matched(self.deadlines(), self.slots(to_promise=False)) == len(self.in_flight)

    def reserve(self, group, *, serving):
        slots, deadlines = self.slots(to_promise=True), self.deadlines()
        if num_matched([*deadlines, serving + self.staleness], slots) == num_matched(deadlines, slots):
            return None
        self.in_flight[group] = serving
        return serving

    def occupy(self, group, *, oldest=None):
        admitted = self.in_flight.pop(group)
        admitted = admitted if oldest is None else min(admitted, oldest)
        for v in sorted(self.occupied):
            if v > admitted + self.staleness or len(self.occupied[v]) == self.quota:
                continue
            self.occupied[v].append(group)
            self.redundant[v] = self.spare
            if self.fits():
                self._settle()
                return v
            self.occupied[v].remove(group)
            del self.redundant[v]
        self._settle()
        return None

    def release(self, group):
        del self.in_flight[group]
        self._settle()

    def is_ready(self):
        return not self.is_consumed and len(self.occupied.get(self.version, [])) == self.quota

    def consume(self):
        groups = self.occupied.pop(self.version)
        self.redundant.pop(self.version, None)
        self.is_consumed = True
        expired = []
        numbers = {group: number for number, group in enumerate(self.in_flight)}
        for group in sorted(self.in_flight, key=lambda each: (self.in_flight[each], -numbers[each])):
            if self.fits():
                break
            del self.in_flight[group]
            expired.append(group)
        self._settle()
        return groups, expired

    def advance(self):
        self.version, self.is_consumed = self.version + 1, False
        self._open()
        self._settle()

    def _settle(self):
        """As few redundant groups as there are groups in flight that no other slot takes; the earliest buffers are spared first."""
        for v in sorted(self.redundant):
            while self.redundant[v] > 0:
                self.redundant[v] -= 1
                if not self.fits():
                    self.redundant[v] += 1
                    break
