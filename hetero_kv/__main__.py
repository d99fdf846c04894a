"""The console script `hetero-kv`, and `python -m hetero_kv` for when scripts are not on the path."""

from typing import NoReturn

from hetero_kv.cli import main
from hetero_kv.ending import end


def program() -> NoReturn:
    """Run `hetero-kv` as the command line says, and end the process."""
    end(main())


if __name__ == "__main__":
    program()
