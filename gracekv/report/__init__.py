"""What was kept where: one HTML page for the eye, tables and figures for papers.

`result.report("page.html")` writes a page of one result, `compare` of several results of one
prompt; `absorbed` tells for one token which entry of each head it went into. Figures need
matplotlib, which is imported when one is drawn.
"""

from gracekv.report.auction import AuctionCurve
from gracekv.report.data import Outcome, ReportData
from gracekv.report.entries import KeptEntries
from gracekv.report.fates import Fates, absorbed
from gracekv.report.figures import plot_auction, plot_entries, plot_map, plot_resolution
from gracekv.report.page import compare, write, write_all

__all__ = [
    "AuctionCurve",
    "Fates",
    "KeptEntries",
    "Outcome",
    "ReportData",
    "absorbed",
    "compare",
    "plot_auction",
    "plot_entries",
    "plot_map",
    "plot_resolution",
    "write",
    "write_all",
]
