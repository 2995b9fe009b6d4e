"""Runs a program that cannot outlive its parent: `python tied.py program argument...`.

Linux kills it when the parent ends, however that ends (prctl(2), PR_SET_PDEATHSIG; kept by execve). A stopped process too.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before that
        sys.exit(1)
    os.execv(sys.argv[1], sys.argv[1:])
