"""One page about one or more runs, in a single file that needs no network."""

from bayesify.lab.report.page import write_report

__all__ = ["write_report"]
