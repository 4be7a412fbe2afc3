"""Length statistics of prompts and reference answers: percentiles, a terminal histogram, the share a limit cuts.

Lengths are kept as exact counts {length: rows}, a few kilobytes for any number of rows, so that every limit can be
judged later without reading the data again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


def summarize(counts: Counter[int]) -> dict[str, float]:
    """rows, min, mean, p50 ... p99, max, in tokens. A percentile is the smallest length that covers that share of rows.

    Example: Counter({2: 1, 4: 3}) -> {"rows": 4, "min": 2, "mean": 3.5, "p50": 4, ..., "max": 4}
    """
    if not counts:
        return {"rows": 0}
    lengths = np.array(sorted(counts))
    rows = np.array([counts[int(length)] for length in lengths])
    covered = np.cumsum(rows)
    total = int(covered[-1])
    ranks = {p: int(lengths[np.searchsorted(covered, p / 100 * total)]) for p in PERCENTILES}
    return {
        "rows": total,
        "min": int(lengths[0]),
        "mean": round(float((lengths * rows).sum() / total), 2),
        **{f"p{p}": value for p, value in ranks.items()},
        "max": int(lengths[-1]),
    }


def share_over(counts: Counter[int], limit: int) -> float:
    """Share of rows longer than `limit` tokens, 0 to 1."""
    total = sum(counts.values())
    return sum(count for length, count in counts.items() if length > limit) / total if total else 0.0


def histogram(counts: Counter[int], *, bins: int = 10, width: int = 40) -> list[str]:
    """Bars of text, one line for each range of lengths. Example: "  0- 19  ###### 30" """
    if not counts:
        return []
    step = max(1, -(-(max(counts) + 1) // bins))
    binned = Counter[int]()
    for length, count in counts.items():
        binned[length // step] += count
    digits, most = len(str(max(counts) + step)), max(binned.values())
    return [
        f"{i * step:>{digits}}-{(i + 1) * step - 1:<{digits}}  "
        f"{'#' * -(-binned[i] * width // most):<{width}} {binned[i]}".rstrip()
        for i in range(min(binned), max(binned) + 1)
    ]


def describe(report: dict[str, Any]) -> str:
    """The report of `covey preprocess` and `covey data stats` for a terminal."""
    lines = [f"{report['rows_in']:,} rows in, {report['rows_out']:,} rows out"]
    lines += [f"  {count:,} left out: {reason.replace('_', ' ')}" for reason, count in report["drops"].items()]
    if report["rows_without_response"]:
        lines.append(f"  {report['rows_without_response']:,} kept without a reference answer")
    stop = ", ".join(report["stop_words"]) or "the tokenizer's eos only"
    lines.append(f"template {report['prompt_type']}; answers end with: {stop}")
    for name in ("prompt", "response"):
        counts = Counter({int(length): count for length, count in report["lengths"][name].items()})
        summary = summarize(counts)
        if not summary["rows"]:
            continue
        figures = "  ".join(f"{key} {value:g}" for key, value in summary.items() if key != "rows")
        lines += [f"{name} length in tokens: {figures}", *(f"  {bar}" for bar in histogram(counts))]
        cut = report.get("cut", {}).get(name)
        if cut:
            lines.append(f"  {cut['share']:.2%} longer than max_{name}_length={cut['limit']}")
    return "\n".join(lines)


def run(
    path: str,
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """`covey data stats FILE`: statistics of preprocessed data, with the share cut by the given limits.

    Raises ValueError when `path` is not the output of `covey preprocess`.
    """
    from rich.console import Console

    from covey.data.manifest import find_manifest, read_manifest

    manifest_path = find_manifest(path)
    if manifest_path is None:
        raise ValueError(f"{path}: no manifest beside it, so not the output of `covey preprocess`. Preprocess it first")
    report = dict(read_manifest(manifest_path)["report"])
    report["cut"] = {}
    for name, limit in (("prompt", max_prompt_length), ("response", max_response_length)):
        counts = Counter({int(length): count for length, count in report["lengths"][name].items()})
        report[f"{name}_length"] = summarize(counts)
        if limit is not None:
            report["cut"][name] = {"limit": limit, "share": share_over(counts, limit)}
    if not quiet:
        Console(highlight=False).print(describe(report), markup=False, soft_wrap=True)
    return report
