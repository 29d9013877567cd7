"""`python -m trainctl.trainer.work.check_rows FILE [--prompts]`: whether every row of a JSONL file can be used, as
training uses it or as a prompt: the check of `trainctl score`.

Exit status 0: it can; 2: one line on standard error names the first row that can't, and why.
"""

import sys
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.rows import NoAnswerError, fields_of, lines_in, prompt_of, row_chunks, row_of


def main() -> int:
    use = prompt_of if "--prompts" in sys.argv[2:] else row_of
    try:
        for chunk in row_chunks(Path(sys.argv[1])):
            for place, line in lines_in(chunk):
                use(fields_of(line, place), place)
    except NoAnswerError as error:
        print(f"{error.where}: no assistant turn to score; use --answers", file=sys.stderr)
        return error.exit_code
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
