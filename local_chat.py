"""Chat with a model over long contexts: `python local_chat.py --help`."""

import sys

from hetero_kv.cli import run_command
from hetero_kv.ending import end

if __name__ == "__main__":
    end(run_command("chat", sys.argv[1:], prog="local_chat.py", is_program=True))
