"""The files of docs/measured that tools/exactness.py writes: their titles, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence

from tools.pages import measured

_CELL = (
    "A cell has the relative error of all gradients, and the largest error of an output: of a "
    "log-prob or an entropy in nats, or of a value."
)
FILES = {
    "exactness_layouts": (
        "Exactness of layouts and features",
        "Packed steps on layouts, with features of models and plans, against one unpadded sample "
        "at a time in one process. M: micro-batches per data-parallel rank, several numbers if "
        "ranks differ. gradient: the relative error of all gradients; worst parameter: the largest "
        "of a single one. Errors of log-probs, and of entropies, are in nats.",
    ),
    "exactness_prefixes": (
        "Exactness of shared prefixes",
        "Steps whose rows share the beginnings of their samples, against one unpadded sample at a "
        f"time. {_CELL}",
    ),
    "exactness_split_samples": (
        "Exactness of samples in pieces",
        "Steps whose long samples are cut into pieces, against one unpadded sample at a time. "
        f"{_CELL}",
    ),
    "exactness_dynamic_cp": (
        "Exactness of rows over several ranks",
        "Steps with rows over several data-parallel ranks, against one unpadded sample at a time. "
        f"{_CELL}",
    ),
    "exactness_models": (
        "Exactness of Hugging Face folders",
        f"Models of folders on layouts, against transformers with one unpadded sample at a time. "
        f"{_CELL}",
    ),
    "exactness_vision": (
        "Exactness of models with images",
        "Packed steps of models with images on layouts, against transformers with one unpadded "
        "sample at a time in fp64: the largest error of a log-prob in nats, the relative error of "
        "the worst tensor's gradient in each part of the model, and of the norm of all gradients.",
    ),
    "exactness_streams": (
        "Exactness of models with hyper-connections",
        "Packed steps of a model with three residual streams on layouts, and in special rows, "
        "against one unpadded sample at a time. Megatron's main refuses stages; the setting is "
        "made after its check. The upper table has the columns of exactness_layouts.md. "
        f"{_CELL.replace('A cell', 'A cell of the lower one')}",
    ),
    "exactness_te": (
        "Exactness over Transformer Engine's layers",
        "The cases of the other files over Transformer Engine's layers on stand-ins of its "
        "kernels, against references without it: the largest errors.",
    ),
    "hybrid_layouts": (
        "Exactness of hybrid models",
        "Packed steps of hybrid models on layouts, against one unpadded sample at a time whose "
        "recurrences are written token by token. Columns are those of exactness_layouts.md.",
    ),
    "hybrid_rows": (
        "Exactness of hybrid models in special rows",
        "Steps of hybrid models with shared prefixes, samples in pieces and rows over several "
        f"ranks, against one unpadded sample at a time. {_CELL}",
    ),
    "hybrid_models": (
        "Exactness of hybrid models of Hugging Face folders",
        "Hybrid models of folders on layouts, against transformers with one unpadded sample at a "
        f"time. {_CELL}",
    ),
}
"""Name -> title, and what was measured."""


def is_whole(*patterns: str | None) -> bool:
    """Whether globs leave out no case; None is no glob."""
    return set(patterns) <= {None, "*"}


def publish(name: str, lines: Sequence[str], with_versions: str, *, whole: bool) -> None:
    """Print a table, and write its file if the table is whole.

    Args:
        whole: Whether all cases ran. A file keeps its rows when a few cases are run again.
    """
    print("\n".join(lines))
    if whole:
        title, what = FILES[name]
        measured.write(name, title, what, lines, with_versions)
