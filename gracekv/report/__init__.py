"""What was kept where: one HTML page for the eye, tables and figures for papers.

`result.report("page.html")` writes a page of one result, `compare` of several results of one
prompt; `absorbed` tells for one token which entry of each head it went into. Figures need
matplotlib, which is imported when one is drawn.
"""

from gracekv.report.auction import AuctionCurve
from gracekv.report.data import Outcome, ReportData
from gracekv.report.entries import KeptEntries
from gracekv.report.figures import plot_auction, plot_entries, plot_map, plot_resolution
from gracekv.report.page import compare, write, write_all
from gracekv.report.token_status import TokenStatuses, absorbed

__all__ = [
    "AuctionCurve",
    "KeptEntries",
    "Outcome",
    "ReportData",
    "TokenStatuses",
    "absorbed",
    "compare",
    "plot_auction",
    "plot_entries",
    "plot_map",
    "plot_resolution",
    "write",
    "write_all",
]
