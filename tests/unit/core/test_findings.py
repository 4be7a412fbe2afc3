"""What of findings is written as JSON, and when they pass."""

from __future__ import annotations

import json
import math

import numpy as np

from covey.findings import Finding, as_json, passed

WARNING = Finding("shm", "warning", "64 MB", "16 GiB", "SIGBUS", "--shm-size=16g", {"total_bytes": np.int64(5)})
FAILURE = Finding("x", "failure", "a", "b", "c", "d", {"gap": math.nan, "list": (1.0, np.float64(2.0))})


def test_warnings_pass_and_failures_do_not():
    assert passed([WARNING])
    assert not passed([WARNING, FAILURE])


def test_json_has_no_numbers_that_json_has_no_word_for():
    result = json.loads(json.dumps(as_json([WARNING, FAILURE]), allow_nan=False))
    assert result["pass"] is False
    assert result["findings"][0]["evidence"] == {"total_bytes": 5}
    assert result["findings"][1]["evidence"] == {"gap": None, "list": [1.0, 2.0]}
