"""`megapack doctor`: which software and settings of this machine would break a run, and the fixes.

Modules:
    runner: runs the probes, those that import torch in a child process
    probes: libraries, environment variables
"""
