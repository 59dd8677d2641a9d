"""The Markdown of a GPU report, a file of docs/measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from tools.pages.marks import table
from tools.pages.measured import Head

GIB = 2**30
NOT_MEASURED = "not measured"
REHEARSED = "On CPU stand-ins: no time and no memory of it means anything."
# FLOPs of a mode in units of one forward; recomputed forwards are not counted.
FORWARDS = {"train": 3, "forward": 1, "logprobs": 1}


def median_seconds(way: dict[str, Any], mode: str) -> float | None:
    """Median over the measured rounds; None without rounds."""
    seconds = way["seconds"][mode]
    return statistics.median(seconds) if seconds else None


def tokens_per_second(way: dict[str, Any], mode: str) -> float | None:
    """Real tokens per second; padding is not counted."""
    seconds = median_seconds(way, mode)
    return None if seconds is None or "tokens" not in way else way["tokens"] / seconds


def utilisation(way: dict[str, Any], mode: str, peak_flops: float | None) -> float | None:
    """Model FLOPs per second over the device's peak; without a peak, FLOPs per second."""
    seconds = median_seconds(way, mode)
    if seconds is None or "forward_flops" not in way:
        return None
    return FORWARDS[mode] * way["forward_flops"] / seconds / (peak_flops or 1.0)


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown, with the head of a measured file."""
    device = next((model["device"] for model in report["models"] if "device" in model), "a GPU")
    what = (
        "Single kernels, packed rows against padded batches and one sample at a time, and the "
        "errors that the tests of the GPU found."
    )
    head = report_head(report, f"Check of one {device}", what)
    lines = [head.text()]
    lines += _tests(report.get("tests"))
    lines += _kernels(report.get("kernels", []))
    for model in report["models"]:
        lines += _model(model)
    found = failures(report)
    lines += ["### What failed", "", *(f"- {text}" for text in found or ["nothing"])]
    return "\n".join(lines) + "\n"


def report_head(report: dict[str, Any], title: str, what: str) -> Head:
    """The head of a report of one GPU or of several ranks."""
    packages = ", ".join(f"{name} {number}" for name, number in report["packages"].items())
    if report.get("rehearsed"):
        what = f"{REHEARSED} {what}"
    return Head(title, what, report["command"], report["date"], report["commit"], packages)


def failures(report: dict[str, Any]) -> list[str]:
    """One line for each part that failed."""
    return list(_failures(report))


def last_line(text: str) -> str:
    """The last line with "Error", else the last line of a process's output; cut to 500 chars."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [""])[-1][:500]


def _failures(report: dict[str, Any]) -> Iterator[str]:
    for model in report["models"]:
        if "error" in model:
            yield f"{model['model']}: {model['error']}"
        for cell in model["cells"]:
            for name, way in cell["ways"].items():
                if "error" in way:
                    yield f"{model['model']}, {cell['trace']}, {name}: {last_line(way['error'])}"
    for line in report.get("kernels", []):
        if "error" in line:
            yield f"kernels, {line['what']}, {line['size']} tokens: {last_line(line['error'])}"
    for name, parts in (report.get("tests") or {}).items():
        for part, found in parts.items():
            if "error" in found:
                yield f"tests, {name}, {part}: {last_line(found['error'])}"


def _tests(tests: dict[str, Any] | None) -> list[str]:
    rows = [
        [name, part, *(_number(found.get(key), ".1e") for key in _ERRORS)]
        for name, parts in (tests or {}).items()
        for part, found in parts.items()
        if "logprob_mean_error" in found
    ]
    if not rows:
        return []
    head = ["attention", "in", "gradient", "one sample", "log-probs mean", "one sample"]
    title = "### Against one unpadded fp32 sample at a time"
    return [title, "", table([*head, "log-probs max"], rows), ""]


_ERRORS = (
    "gradient_error",
    "one_sample_gradient_error",
    "logprob_mean_error",
    "one_sample_logprob_mean_error",
    "logprob_max_error",
)


def _kernels(lines: list[dict[str, Any]]) -> list[str]:
    """TFLOP/s, the forward's and the backward's, of each kernel (a column) and size (a row)."""
    if not lines:
        return []
    found = {(line["what"], line["size"]): line for line in lines}
    columns = list(dict.fromkeys(line["what"] for line in lines))
    rows = [
        [f"{size:,}", *(_rates(found.get((what, size), {})) for what in columns)]
        for size in sorted({line["size"] for line in lines})
    ]
    title = "### TFLOP/s of a forward and of a backward, by tokens of a sample (a matrix: of a row)"
    return [title, "", table(["tokens", *columns], rows), ""]


def _rates(line: dict[str, Any]) -> str:
    if "forward_ms" not in line:
        return NOT_MEASURED
    forward = line["flops"] / line["forward_ms"] / 1e9
    # Attention computes the scores again in its backward: five products for the forward's two.
    times = 2 if line["what"] == "matrix" else 2.5
    return f"{forward:.0f}, {times * line['flops'] / line['backward_ms'] / 1e9:.0f}"


def _model(model: dict[str, Any]) -> list[str]:
    if "device" not in model:
        return []
    peak = model["peak_flops"]
    peak_text = "peak unknown" if peak is None else f"peak {peak / 1e12:.1f} TFLOP/s"
    lines = [
        f"### {model['model']} on {model['device']}",
        "",
        f"{model['parameters'] / 1e9:.2f} B parameters, {model['dtype']}, recompute "
        f"{model['recompute']}; {peak_text}.",
        "",
    ]
    for cell in model["cells"]:
        lines += [
            f"{cell['trace']}: {cell['num_samples']} samples, {cell['tokens']} tokens, "
            f"{cell['response_tokens']} of them response, the longest {cell['longest']}; rows of "
            f"{cell['max_tokens_per_gpu']}.",
            "",
            table(_COLUMNS, [_way(name, way, model) for name, way in cell["ways"].items()]),
            "",
            table(["target", "asked", "measured"], comparisons(cell)),
            "",
        ]
    return lines


_COLUMNS = [
    "way",
    "M",
    "real / row tokens",
    "forward, tokens/s",
    "forward and backward, tokens/s",
    "MFU",
    "log-prob pass, tokens/s",
    "peak GiB",
    "predicted GiB",
]


def _way(name: str, way: dict[str, Any], model: dict[str, Any]) -> list[str]:
    filled = way["tokens"] / way["row_tokens"] if "tokens" in way else None
    peak = way.get("peak_bytes")
    mfu = utilisation(way, "train", model["peak_flops"]) if model["peak_flops"] else None
    speeds = {mode: _number(tokens_per_second(way, mode), ",.0f") for mode in FORWARDS}
    return [
        name,
        _number(way.get("num_microbatches"), "d"),
        _number(filled, ".3f"),
        speeds["forward"],
        speeds["train"],
        _number(mfu, ".3f"),
        speeds["logprobs"],
        _number(None if peak is None else peak / GIB, ".1f"),
        _number(_predicted_peak(way, model), ".1f"),
    ]


def _predicted_peak(way: dict[str, Any], model: dict[str, Any]) -> float | None:
    """GiB: what was allocated before the first step, and the memory model's activations and head.
    Only packed ways have a prediction."""
    static, more = model.get("static_bytes"), way.get("predicted_bytes")
    return None if static is None or more is None else (static + more) / GIB


def comparisons(cell: dict[str, Any]) -> list[list[str]]:
    """Rows of target, required and measured value, for forward and backward.

    "packed" is the first packed way. The dense ceiling is compared by FLOPs, because its samples
    have another length.
    """
    ways = cell["ways"]
    packed = ways[next(name for name in ways if name.startswith("packed"))]

    def speed_over(name: str) -> float | None:
        mine, other = (tokens_per_second(way, "train") for way in (packed, ways[name]))
        return None if mine is None or other is None else mine / other

    mine, ceiling = (utilisation(way, "train", None) for way in (packed, ways["dense"]))
    share = None if mine is None or ceiling is None else mine / ceiling
    return [
        ["packed over one sample", "4.0 or more", _number(speed_over("one sample"), ".2f")],
        ["packed over padded", "2.0 or more", _number(speed_over("padded"), ".2f")],
        ["packed over dense, at equal FLOPs", "0.95 or more", _number(share, ".3f")],
        *_host(cell.get("host"), median_seconds(packed, "train")),
    ]


def _host(host: dict[str, Any] | None, step: float | None) -> list[list[str]]:
    share = None
    each = {}
    if host is not None and step is not None:
        each = {part: statistics.median(host[f"{part}_seconds"]) for part in _HOST_PARTS}
        share = sum(each.values()) / (step + each["planning"])
        each = {part: 1e3 * value / host["num_microbatches"] for part, value in each.items()}
    rows = [["host time over the step", "below 0.02", _number(share, ".4f")]]
    for part in _HOST_PARTS:
        rows.append([f"{part}, host ms per micro-batch", "-", _number(each.get(part), ".3f")])
    return rows


_HOST_PARTS = ("planning", "adapter")


def _number(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else format(value, form)
