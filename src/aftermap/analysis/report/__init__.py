"""The report: one HTML file, and the verdict that it shares with the command line."""

from aftermap.analysis.report.cards import Features
from aftermap.analysis.report.comparison import MARKS, Row, Verdict, comparison, score_notes, variance_notes, verdict
from aftermap.analysis.report.definitions import Definition, definition, written
from aftermap.analysis.report.report import render_report, write_report

__all__ = [
    "MARKS",
    "Definition",
    "Features",
    "Row",
    "Verdict",
    "comparison",
    "definition",
    "render_report",
    "score_notes",
    "variance_notes",
    "verdict",
    "write_report",
    "written",
]
