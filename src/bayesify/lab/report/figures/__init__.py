"""The figures of the report: what they show, how they are drawn, and the files offered beside them."""
