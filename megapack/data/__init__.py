"""Rollouts from files to batches, without torch.

Modules:
    files, tokenizer: JSON Lines and Parquet -> checked samples
    rollouts: batches of whole prompt groups
    advantages: rewards of rollouts -> advantages
    index, dataset: random access to any sample
    lengths: lengths alone, for the planner's commands
    generated: toy rollouts
    batches: config -> data set -> batches -> plans
"""
