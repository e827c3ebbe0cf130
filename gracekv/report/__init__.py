"""What was kept where: one HTML page for the eye, tables and figures for papers.

`result.report("page.html")` writes a page of one result, `compare` of several results of one
prompt; `token_statuses` tells which entry of each head stands for a token. Figures need
matplotlib, which is imported when one is drawn.
"""

from gracekv.report.auction import AuctionCurve
from gracekv.report.data import ReportColumn, ReportData
from gracekv.report.entries import KeptEntries
from gracekv.report.figures import plot_auction, plot_entries, plot_map, plot_resolution
from gracekv.report.page import compare, write, write_all
from gracekv.report.token_status import TokenStatuses, token_statuses

__all__ = [
    "AuctionCurve",
    "KeptEntries",
    "ReportColumn",
    "ReportData",
    "TokenStatuses",
    "compare",
    "plot_auction",
    "plot_entries",
    "plot_map",
    "plot_resolution",
    "token_statuses",
    "write",
    "write_all",
]
