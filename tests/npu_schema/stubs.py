"""Stub CANN libraries, so that the real torch_npu imports where there is no CANN: its schemas and shape functions work.

Every function that the package needs and no library here has is made to return 0; a few answer as a machine with one
Ascend 910B would. Nothing can be computed. Built once for each version of torch_npu, into `.cache/npu-stubs`.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "npu-stubs"
# Opened at run time, besides those that the package is linked with.
_OPENED = {"libascendcl.so", "libhccl.so", "libopapi.so", "libatb.so", "libge_runner.so", "libgraph.so"}
_OURS = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetDevice(int *device) { *device = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "stub library"; }
int aclrtCreateStream(void **stream) { *stream = malloc(8); return 0; }
int aclrtCreateStreamWithConfig(void **stream, uint32_t a, uint32_t b) { *stream = malloc(8); return 0; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { *event = malloc(8); return 0; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { *event = malloc(8); return 0; }
int aclrtMalloc(void **data, size_t size, int policy) { *data = malloc(size ? size : 1); return 0; }
int aclrtMallocAlign32(void **data, size_t size, int policy) { *data = malloc(size ? size : 1); return 0; }
int aclrtMallocHost(void **data, size_t size) { *data = malloc(size ? size : 1); return 0; }
int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) { *unused = *total = (size_t)64 << 30; return 0; }
size_t aclGetCompileoptSize(int option) { return 8; }
int aclGetCompileopt(int option, char *value, size_t length) { if (length) strcpy(value, "0"); return 0; }
"""


def load() -> None:
    """Build the libraries if needed and open them; must run before torch is imported, which imports torch_npu."""
    for library in build():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def build() -> list[Path]:
    """The libraries."""
    package = Path(str(distribution("torch-npu").locate_file("torch_npu")))
    version = distribution("torch-npu").version + Path(__file__).read_text(encoding="utf-8")
    directory = CACHE / hashlib.sha256(version.encode()).hexdigest()[:16]
    if not (directory / "complete").exists():
        directory.mkdir(parents=True, exist_ok=True)
        _build(package, directory)
        (directory / "complete").touch()
    return sorted(directory.glob("*.so"))


def _build(package: Path, directory: Path) -> None:
    binaries = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    torch_libraries = list((package.parent / "torch" / "lib").glob("*.so*"))
    system = [Path(path) for path in re.findall(r"=> (/\S+)", _output("ldconfig", "-p"))]
    known = {path.name for path in (*binaries, *torch_libraries, *system)}
    needed = {name for path in binaries for name in re.findall(r"NEEDED.*\[(.+)\]", _output("readelf", "-d", path))}
    basic = [path for path in system if re.match(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so", path.name)]
    defined = _symbols("--defined-only", [*binaries, *torch_libraries, *basic])
    missing = _symbols("--undefined-only", binaries) - defined
    opened = set(re.findall(r"^(?:acl|Hccl|hccl|Hcom)\w*$", _output("strings", *package.glob("lib/*.so")), re.M))
    opened -= {name for name in opened if name.startswith("aclnn")}
    names = {name for name in missing | opened if re.fullmatch(r"[A-Za-z]\w*", name) and not name.startswith("Py")}
    names -= set(re.findall(r"(\w+)\(", _OURS))
    source = directory / "stubs.c"
    source.write_text(_OURS + "".join(f"int64_t {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    for library in sorted(_OPENED | {name for name in needed - known if not name.startswith(("libtorch", "libc10"))}):
        options = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
        subprocess.run(["gcc", *options, str(source), "-o", str(directory / library)], check=True)


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    listed = _output("nm", "-D", which, *libraries)
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line and not line.endswith(":")}


def _output(*command: str | Path) -> str:
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, errors="replace").stdout
