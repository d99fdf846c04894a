"""`python -m hetero_kv`, which is `hetero-kv` wherever scripts are not on the path."""

import sys

from hetero_kv.cli import main

sys.exit(main())
