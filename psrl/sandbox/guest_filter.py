"""The system calls by which a program could change the guest from outside, refused to it and to all that it starts.

Limits and scheduling of a process can be set by any other one of its user, without a signal or a trace: a program that takes the guest's
files or CPU time away would make its own sandbox look broken. A program that does this to itself or to its own processes may.
Standard library only (Python 3.9 or newer): this file is copied into the sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from guest_kernel import LIBC

INSTRUCTION = struct.Struct("HBBI")
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
OFFSET_NUMBER, OFFSET_ARCHITECTURE, OFFSET_ARGUMENTS = 0, 4, 16
ALLOW, KILL_PROCESS, DENY = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
X32_BIT = 0x40000000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
BY_PID = {
    "x86_64": {"sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "prlimit64": 302, "sched_setattr": 314},
    "aarch64": {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "prlimit64": 261, "sched_setattr": 274},
}
"""Their first argument is a pid."""
BY_KIND = {"x86_64": {"setpriority": (141, 2), "ioprio_set": (251, 3)}, "aarch64": {"setpriority": (140, 2), "ioprio_set": (30, 3)}}
"""Number, and the first argument that means all processes of a user; else the second one is a pid or, the guest's being equal, a group."""


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("size", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def protect() -> bool:
    """From here on the filter holds for this process, the guest, and all that it starts.

    False where the machine's numbers are not known or it has no filters: the guest then sees only what was done.
    OSError: the kernel takes none.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES or not _has_filters():
        return False
    instructions = _filter(machine, os.getpid())
    program = FilterProgram(len(instructions) // INSTRUCTION.size, instructions)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)):
        if LIBC.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")
    return True


def _filter(machine: str, guest_pid: int) -> bytes:
    program = [
        (LOAD_WORD, 0, 0, OFFSET_ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD_WORD, 0, 0, OFFSET_NUMBER),
        # The x32 numbers of the same machine would walk around the list.
        (JUMP_IF_AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, DENY),
    ]
    refused = [(number, [(0, guest_pid)]) for number in BY_PID[machine].values()]
    refused += [(number, [(0, all_of_a_user), (1, guest_pid)]) for number, all_of_a_user in BY_KIND[machine].values()]
    for number, arguments in refused:
        program.append((JUMP_IF_EQUAL, 0, 3 * len(arguments) + 1, number))
        for position, value in arguments:
            # The low half, which comes first: the kernel takes an int.
            program += [(LOAD_WORD, 0, 0, OFFSET_ARGUMENTS + 8 * position), (JUMP_IF_EQUAL, 0, 1, value), (RETURN, 0, 0, DENY)]
        program.append((RETURN, 0, 0, ALLOW))
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in program)


def _has_filters() -> bool:
    LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)  # a kernel that has them misses the filter, another one knows no such mode
    return ctypes.get_errno() == errno.EFAULT
