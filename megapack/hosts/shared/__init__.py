"""Parts of the hosts' modules.

Modules:
    balancing: partitions of even sums, bins under a budget
    bin_packers: packers with a capacity, by name
    flops: cost of a sample, from Megatron's arguments
    options: the options behind each host's `configure`
    rank_rows: rows of one rank, and M for all ranks
    rollout_schedule: schedules of whole rollouts
    tensor_rows: samples of tensor fields

Used by one host: megatron_lm_data, nemo_rl_shards, unirl_bins, verl_items.
"""
