"""Whole steps of hosts' own code on a CPU, with and without megapack's patches.

Modules:
    job: what the workers share: arguments, counters, reports, and how tests start them
    NAME: the worker of one host, which runs the host's own step and writes what came out
"""
