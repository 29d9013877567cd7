"""`python -m trainctl.trainer.data.check_rows FILE`: whether every row of a JSONL file can be used.

Exit status 0: it can; 2: one line on standard error names the first row that can't, and why.
"""

import sys
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.rows import read_rows


def main() -> int:
    try:
        for _ in read_rows(Path(sys.argv[1])):
            pass
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
