"""A measuring process that hangs: it prints its first argument and waits for ever, or ends
itself by the signal that its second argument names.
"""

import os
import sys

given = sys.argv[1:]
print(given[0], flush=True)
if len(given) > 1:
    os.kill(os.getpid(), int(given[1]))
sys.stdin.read()
