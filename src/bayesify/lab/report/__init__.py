"""The report: one page about one or more models, in a single file that works offline."""

from bayesify.lab.report.page import write_report

__all__ = ["write_report"]
