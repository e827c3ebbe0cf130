"""Reports on compressed caches: an HTML page, and tables.

`result.report("page.html")` writes a page for one result, `compare` a page for several results of
one prompt. `token_statuses` lists the entry that holds a token in each head.
"""

from typing import TYPE_CHECKING

from gracekv.allocate.curve import AuctionCurve as AuctionCurve
from gracekv.decode.limit import CutHistory as CutHistory
from gracekv.report.data import ReportColumn as ReportColumn
from gracekv.report.data import ReportData as ReportData
from gracekv.report.entries import KeptEntries as KeptEntries
from gracekv.report.page import compare as compare
from gracekv.report.page import write as write
from gracekv.report.page import write_all as write_all
from gracekv.report.token_status import TokenStatuses as TokenStatuses
from gracekv.report.token_status import token_statuses as token_statuses

# If type checkers saw this, they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        why = " Figures went in 0.3: the page of `result.report` shows them."
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{why if 'plot_' in name else ''}"
        )
