"""Parts of several hosts' modules; what one host alone needs is in its own folder.

Modules:
    bins: packs of a data set, and the split of a host's own packs
    families: samples with common beginnings, which belong in one row
    flops: cost of a token and of a squared token, from Megatron's arguments
    images: work of images in the rows of their samples
    loss_tokens: a host's loss without samples that have no loss token
    native: settings of megapack in a host's own config
    options: the options behind each host's `configure`
    rank_items: one rank's samples, packed within a budget, and M of all ranks
    rank_rows: rows of one rank, and numbers that ranks agree on
    rollout_schedule: schedules of whole rollouts
    tensor_rows: samples of tensor fields
    towers: warnings of the towers of hosts' models
"""
