"""What makes the references needs libraries that the tests don't."""

collect_ignore_glob = ["make_*.py"]
