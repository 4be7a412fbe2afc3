"""Opens the stub libraries before anything imports torch, which imports torch_npu where that is installed."""

from importlib.util import find_spec

from tests.npu_schema import stubs

if find_spec("torch_npu") is not None:
    stubs.load()
