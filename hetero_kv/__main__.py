"""`python -m hetero_kv` is the same as `hetero-kv`, for when scripts are not on the path."""

import sys

from hetero_kv.cli import main

sys.exit(main())
