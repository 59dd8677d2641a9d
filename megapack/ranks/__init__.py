"""Links between the ranks of a job, in addition to Megatron's process groups.

Modules:
    agree: ranks compare what they are about to do; the next step is prepared ahead
    board, watchdog, watchdog_config: failures reach ranks that are stuck in a collective
    links: Ranks: starts and owns all of this; one rank's error becomes every rank's
    threads: calls on daemon threads
    place: what a rank is doing, for messages
    interrupt: signals
"""
