"""`python -m trainstream` is the `trainstream` command."""

import sys

from trainstream.cli import main

sys.exit(main())
