"""NCCL's rules, checked on jobs that run over gloo, which allows more.

`recorder` notes what each rank issues, `nccl_rules` compares the notes of all ranks, and `progress`
runs them through a model of NCCL's queues. `tests/dist/fork_server.py` does this for every job.
"""
