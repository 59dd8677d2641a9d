"""Tokens that samples have in common at their beginnings, and rows that hold them once.

    SharedPrefixes (of a batch) -> worthwhile -> PrefixTable (on a layout) -> Branches (of a row)

Modules:
    shared: SharedPrefixes: which tokens each sample has in common with which others
    table: PrefixTable: the tokens that rows save, as arrays, for planning
    worth: which of them pay
    branches: Branch: a part of a row that belongs to the same samples
    host_rows: HostRow: a row that another framework has packed, and the row that holds its
        prefixes once
"""

from megapack.prefixes.branches import DUMMY_TOKENS, EARLIER, Branch, dummy_spans, row_branches
from megapack.prefixes.host_rows import HostRow, find_host_row
from megapack.prefixes.shared import SharedPrefixes
from megapack.prefixes.table import PrefixTable, Spans
from megapack.prefixes.worth import worthwhile

__all__ = [
    "DUMMY_TOKENS",
    "EARLIER",
    "Branch",
    "HostRow",
    "PrefixTable",
    "SharedPrefixes",
    "Spans",
    "dummy_spans",
    "find_host_row",
    "row_branches",
    "worthwhile",
]
