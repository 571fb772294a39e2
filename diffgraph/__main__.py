"""`python -m diffgraph` is the command `diffgraph`."""

import sys

from diffgraph.cli.main import main

sys.exit(main())
