"""The system calls that a sandboxed program is refused, as a seccomp filter (classic BPF) for bubblewrap.

Numbers are those of the kernel's tables for x86_64 and aarch64 (arch/x86/entry/syscalls/syscall_64.tbl,
include/uapi/asm-generic/unistd.h). The filter refuses; it does not list what is allowed: file access is bounded by the
mounts, the network by its namespace, resources by limits. It closes what those leave open: sockets of any kind, new
namespaces (and with them a way around the process limit), tracing, kernel interfaces with a history of holes.
"""

from __future__ import annotations

import errno
import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED: dict[str, tuple[int, int]] = {  # name: (x86_64, aarch64)
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_CLONE_NEWUSER = 0x10000000
_X32 = 0x40000000  # x86_64's second table of numbers

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian


def build_filter(machine: str | None = None) -> bytes:
    """The filter for `machine` (default: this one); ValueError where the table has no column for it."""
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"no table of system calls for {machine}; known: {', '.join(_AUDIT_ARCH)}")
    column = list(_AUDIT_ARCH).index(machine)
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(_JUMP_SET, _X32, false=1), refuse]
    for numbers in _REFUSED.values():
        program += [_instruction(_JUMP_EQUAL, numbers[column], false=1), refuse]
    program += [  # ENOSYS makes the C library fall back to clone, whose flags can be seen here
        _instruction(_JUMP_EQUAL, _CLONE3[column], false=1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _instruction(_JUMP_EQUAL, _CLONE[column], false=3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_SET, _CLONE_NEWUSER, false=1),
        refuse,
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, *, true: int = 0, false: int = 0) -> bytes:
    """One BPF instruction; `true` and `false` are how many instructions a jump skips."""
    return struct.pack("=HBBI", code, true, false, value)
