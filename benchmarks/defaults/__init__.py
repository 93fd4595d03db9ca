"""Which options a method should have by default, measured on a suite of tasks: `python -m benchmarks.defaults`."""
