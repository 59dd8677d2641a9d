"""Tokens that samples have in common at their beginnings, and rows that hold them once.

    SharedPrefixes (of a batch) -> worthwhile -> PrefixTable (on a layout) -> Branches (of a row)

Modules:
    shared: SharedPrefixes: which tokens each sample has in common with which others
    table: PrefixTable: the tokens that rows save, as arrays, for planning
    worth: which of them pay
    branches: Branch: a part of a row that belongs to the same samples; branches as sequences
    host_rows: HostRow: a row that another framework has packed, and the row that holds its
        prefixes once
"""

from megapack.prefixes.branches import DUMMY_TOKENS as DUMMY_TOKENS
from megapack.prefixes.branches import EARLIER as EARLIER
from megapack.prefixes.branches import Branch as Branch
from megapack.prefixes.branches import dummy_spans as dummy_spans
from megapack.prefixes.branches import row_branches as row_branches
from megapack.prefixes.branches import sequences as sequences
from megapack.prefixes.host_rows import HostRow as HostRow
from megapack.prefixes.host_rows import find_host_row as find_host_row
from megapack.prefixes.shared import SharedPrefixes as SharedPrefixes
from megapack.prefixes.table import PrefixTable as PrefixTable
from megapack.prefixes.table import Spans as Spans
from megapack.prefixes.worth import worthwhile as worthwhile
