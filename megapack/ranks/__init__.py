"""What holds the ranks of a job together beside Megatron's groups.

agree            compare before communicating; prepare the next step meanwhile
board, watchdog  failures reach ranks that are stuck in a collective
links            Ranks: starts and owns all of it; one rank's error becomes every rank's
executor         calls on a thread of their own, with a limit
place            where a rank is, for messages
interrupt, cpu   signals; Megatron on a machine without CUDA
"""
