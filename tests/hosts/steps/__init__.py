"""Whole steps of hosts' own code on a CPU, with and without megapack's patches.

Modules:
    job: what the workers share: arguments, counters, reports, and how tests start them
    NAME: the worker of one host, which runs the host's own step and writes what came out
    chunks: the toy model's chunks with the settings that a host gives Megatron
    rl_samples: a toy rollout of prompts and responses
    rollout_hosts: what the workers of slime and miles share
    rollout_checks: what the tests of slime's and miles' steps share
    one_sample: the reference of slime's and miles' first step, one sample at a time
"""
