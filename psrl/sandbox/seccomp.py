"""The system calls that sandboxed programs are refused, as a classic BPF program for `bwrap --seccomp`.

Only calls whose effects escape the other limits: memory that no rlimit counts (memfd, System V and POSIX queues), rings that
bypass filters, tracing, keyrings, new namespaces and mounts. They fail with EPERM; a program goes on.
"""

from __future__ import annotations

import errno
import platform
import struct

INSTRUCTION = struct.Struct("HBBI")
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
OFFSET_NUMBER, OFFSET_ARCHITECTURE = 0, 4
ALLOW, KILL_PROCESS, DENY = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
X32_BIT = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "ptrace": 101, "mount": 165, "umount2": 166, "mq_open": 240,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
        "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
DENIED_EVERYWHERE = {"io_uring_setup": 425, "fsopen": 430, "memfd_secret": 447}
"""Numbers from 424 on are the same on every architecture."""


def denied_calls_filter() -> bytes | None:
    """The filter for this machine; None where the numbers are not known (the namespaces still hold)."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        return None
    numbers = sorted({*DENIED[machine].values(), *DENIED_EVERYWHERE.values()})
    program = [
        (LOAD_WORD, 0, 0, OFFSET_ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD_WORD, 0, 0, OFFSET_NUMBER),
        # The x32 numbers of the same machine would walk around the list.
        (JUMP_IF_AT_LEAST, len(numbers) + 1, 0, X32_BIT),
    ]
    for position, number in enumerate(numbers):
        program.append((JUMP_IF_EQUAL, len(numbers) - position, 0, number))
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in program)
