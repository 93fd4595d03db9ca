"""What being Bayesian costs, here and with other libraries: ratios to the plain network, measured in one process."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported; its profiler announces every start
