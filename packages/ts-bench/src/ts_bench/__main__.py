"""`python -m ts_bench` is the `ts-bench` command."""

import sys

from ts_bench.cli import main

sys.exit(main())
