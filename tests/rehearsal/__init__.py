"""Rehearsals on a CPU of what runs on GPUs.

- NCCL's rules, which gloo does not hold: `recorder` notes what each rank issues, `nccl_rules`
  compares the notes of all ranks, and `progress` runs them through a model of NCCL's queues.
  `tests/dist/fork_server.py` does this for every job.
- `device_ledger`: which tensors would be on a GPU, and where the host would wait for it.
- `gpu`: a process that takes the machine's CPU for a GPU, for `REHEARSE=1 tools/gpu_check.sh`.
"""
