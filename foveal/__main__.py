"""`python -m foveal`."""

import sys

from foveal.cli import main

sys.exit(main())
