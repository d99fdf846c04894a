"""Public data files, one module per benchmark; importing the package registers formats and their tasks."""

import hetero_kv.evals.formats.infinitebench
import hetero_kv.evals.formats.longbench
import hetero_kv.evals.formats.lost_in_the_middle
import hetero_kv.evals.formats.ruler  # noqa: F401
